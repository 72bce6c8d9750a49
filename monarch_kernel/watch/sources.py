"""Sources of facts, one module per origin."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from monarch_kernel.actor import ProcMesh
from monarch_kernel.debugger import existing_debugger, on_made, on_verdict
from monarch_kernel.debugger.events import Event, Key, RankGone, RankResumed, RankStop, RankStopped, shown_frame
from monarch_kernel.introspection import (
    ActorActivity,
    Death,
    MeshObserver,
    Observed,
    ObservedMesh,
    ProcUnresponsive,
    whole_of,
)
from monarch_kernel.meshes import get_mesh, kept_host_of, list_proc_meshes, on_change, parse_ranks
from monarch_kernel.subscriptions import Subscription
from monarch_kernel.watch.board import (
    ActorsFact,
    CellFact,
    Condition,
    Fact,
    FailureFact,
    HostFact,
    MeshFact,
    MeshGone,
    MeshMark,
    ProcFact,
    StopFact,
)
from monarch_kernel.watch.model import ActorView, GpuView, RankState, StopView
from monarch_kernel.workers import placement_of
from workspace_sync.model.sync_report import on_synced, trees

if TYPE_CHECKING:
    from monarch_kernel.debug import MeshDebugger
    from monarch_kernel.debugger.controller.hang.verdict import Verdict


class Give(Protocol):
    """Accepts facts that become known together. Thread-safe."""

    def __call__(self, *facts: Fact) -> None: ...


#: A source is opened with the first watch. It gets a function that accepts facts, and returns a function that ends it.
#: It may report facts on any thread, but none after its end.
Source: TypeAlias = Callable[[Give], Callable[[], None]]


# Facts from the debugger: where ranks are stopped, and hangs. The source never creates a debugger.


def follow_debugger(give: Give) -> Callable[[], None]:
    """Start the source."""
    follower = _Follower(give)
    made = on_made.subscribe(follower.follow)
    verdicts = on_verdict.subscribe(_Hangs(give).on_verdict)
    debugger = existing_debugger()
    if debugger is not None:
        follower.follow(debugger)

    def end() -> None:
        made.close()
        verdicts.close()
        follower.close()

    return end


class _Follower:
    """Subscribes to the debugger. A rank may have several stopped threads; the first one is reported.

    The frames of an error (post mortem) hold no thread, so the rank is not stopped.
    """

    def __init__(self, give: Give) -> None:
        self._give = give
        self._subscription: Subscription | None = None
        self._stops: dict[Key, RankStop] = {}

    def follow(self, debugger: MeshDebugger) -> None:
        self.close()
        self._stops.clear()
        self._subscription = debugger.subscribe(self._on_event)
        for at in debugger.stops():
            self._on_event(RankStopped(at))

    def close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RankStopped):
            if not event.at.stop.thread:
                return
            self._stops[event.at.key] = event.at
            self._tell(event.at.mesh, event.at.rank)
        elif isinstance(event, RankResumed):
            if self._stops.pop(event.key, None) is not None:
                self._tell(event.key[0], event.key[1])
        elif isinstance(event, RankGone):
            for key in [key for key in self._stops if key[:2] == (event.mesh, event.rank)]:
                del self._stops[key]
            self._tell(event.mesh, event.rank)

    def _tell(self, mesh: str, rank: int) -> None:
        try:
            key = whole_of(get_mesh(mesh)).uid
        except LookupError:
            return  # the mesh was stopped meanwhile
        at = next((at for at in self._stops.values() if (at.mesh, at.rank) == (mesh, rank)), None)
        if at is None:
            self._give(StopFact(key, rank, None))
            return
        stop = at.stop
        frame = shown_frame(stop.frames)
        view = StopView(stop.reason, text=stop.text)
        if frame is not None:
            view = StopView(stop.reason, frame.file, frame.line, frame.name, stop.text)
        self._give(StopFact(key, rank, view, stop.since))


class _Hangs:
    """Converts verdicts to facts.

    A mesh hangs if two verdicts in a row agree, because a single one may be premature.
    """

    def __init__(self, give: Give) -> None:
        self._give = give
        self._before: dict[str, str] = {}
        self._told: dict[str, str] = {}

    def on_verdict(self, mesh: object, verdict: Verdict) -> None:
        from monarch_kernel.debugger.controller.hang.verdict import NOTHING, PAUSED

        whole = whole_of(mesh)
        if len(whole.ranks) != len(whole.procs):
            return
        sentence = "" if verdict.kind in (NOTHING, PAUSED) else verdict.sentence
        if sentence and self._before.get(whole.uid) == sentence:
            self._give(MeshMark(whole.uid, {"hang": sentence}))
            if self._told.get(whole.uid) != sentence:
                self._give(FailureFact("hang", sentence, mesh=whole.uid))
            self._told[whole.uid] = sentence
        elif not sentence:
            self._told.pop(whole.uid, None)
            self._give(MeshMark(whole.uid, {"hang": ""}))
        self._before[whole.uid] = sentence


# Facts from the runtime: meshes, deaths, unresponsive ranks, and reports of host agents and ranks.


class RuntimeSource:
    """Converts events of an observer to facts.

    Args:
        give: accepts the facts.
        period: the minimum interval between two reports of one host (seconds).
    """

    def __init__(self, give: Give, period: float) -> None:
        self._give = give
        self._answered: dict[str, int] = {}  # by proc: the last request for a full report that it has answered
        self._news = threading.Condition()
        self.observer = MeshObserver(self, period)

    def refresh(self, waits_for: Callable[[], Collection[str]], timeout: float) -> bool:
        """Request full reports, and wait for the answers of these procs. Return False after the timeout."""
        number = self.observer.ask_again()

        def answered() -> bool:
            return all(self._answered.get(proc, 0) >= number for proc in waits_for())

        with self._news:
            return self._news.wait_for(answered, timeout)

    def meshes_changed(self, changed: Sequence[ObservedMesh], gone: Sequence[str]) -> None:
        """See ``ObserverEvents``."""
        facts: list[Fact] = [*map(MeshGone, gone), *map(_mesh, changed)]
        for mesh in changed:
            for ref, pid in zip(mesh.procs, mesh.pids, strict=True):
                if pid:
                    facts += (ProcFact(ref.id, {"pid": pid}), Condition(ref.id, RankState.STARTING, False))
        self._give(*facts)

    def proc_died(self, proc: str, death: Death) -> None:
        """See ``ObserverEvents``."""
        if death.kind.intended:
            self._give(Condition(proc, RankState.ENDED, True, cause=death.cause))
        else:
            failure = FailureFact("death", death.cause, (proc,))
            self._give(Condition(proc, RankState.DEAD, True, cause=death.cause), failure)

    def host_lost(self, agent: str, death: Death) -> None:
        """See ``ObserverEvents``."""
        self._give(HostFact(agent, {"gone": death.cause}))

    def proc_vitals(self, proc: str, report: ProcUnresponsive | None) -> None:
        """See ``ObserverEvents``."""
        if report is None:
            self._give(Condition(proc, RankState.UNRESPONSIVE, False))
            return
        facts: list[Fact] = [Condition(proc, RankState.UNRESPONSIVE, True, cause=report.why)]
        if not report.stack:  # a repeated report
            facts.append(FailureFact("unresponsive", f"does not respond: {report.why}", (proc,)))
        self._give(*facts)

    def procs_healing(self, procs: frozenset[str], begins: bool) -> None:
        """See ``ObserverEvents``."""
        self._give(*(Condition(proc, RankState.HEALING, begins, cause="it is being healed") for proc in procs))

    def host_reported(self, agent: str, report: Observed, ahead: float) -> None:
        """See ``ObserverEvents``."""
        facts: list[Fact] = []
        host = report.host
        if host is not None:
            gpus = tuple(GpuView(g.index, g.name, g.use, g.memory_used, g.memory_total) for g in host.gpus)
            fields = {
                "cores": host.cores,
                "cpu": host.cpu,
                "memory_used": host.memory_used,
                "memory_total": host.memory_total,
                "gpus": gpus,
                "gone": "",
            }
            facts.append(HostFact(agent, fields))
        for proc in report.procs:
            fields = {
                "pid": proc.pid,
                "started": proc.started - ahead,
                "rss": proc.rss,
                "cpu": proc.cpu,
                "gpu_memory": proc.gpu_memory,
            }
            facts.append(ProcFact(proc.proc, fields))
            if proc.up:
                facts.append(Condition(proc.proc, RankState.STARTING, False))
        for proc, activity in report.activity.items():
            actors = {actor.actor: _actor(actor, ahead) for actor in activity.actors}
            facts.append(CellFact(proc, activity.cell, activity.cell_since and activity.cell_since - ahead))
            facts.append(ProcFact(proc, {"sent": activity.sent, "received": activity.received}))
            if actors or activity.gone:
                facts.append(ActorsFact(proc, actors, tuple(activity.gone)))
        self._give(*facts)
        if report.activity:
            with self._news:
                self._answered.update((proc, activity.number) for proc, activity in report.activity.items())
                self._news.notify_all()


def _mesh(mesh: ObservedMesh) -> MeshFact:
    kept = kept_host_of(mesh.mesh)
    return MeshFact(
        mesh.key,
        mesh.name,
        mesh.labels,
        mesh.sizes,
        tuple(ref.id for ref in mesh.procs),
        tuple(ref.agent for ref in mesh.procs),
        {ref.agent: ref.host for ref in mesh.procs},
        kept.name if kept is not None else "",
    )


def _actor(actor: ActorActivity, ahead: float) -> ActorView:
    since = actor.since and actor.since - ahead
    return ActorView(actor.name, actor.cls, actor.endpoint, since, actor.waiting, actor.calls, actor.failures)


# Facts from workspace syncs: the trees of hosts, and ranks with older modules than their hosts.

log = logging.getLogger(__name__)

#: The time for ranks to report their imported modules (seconds).
ASK_TIMEOUT = 2.0


def follow_syncs(give: Give) -> Callable[[], None]:
    """Start the source. Ranks are queried after each sync, and at the start if their hosts have synced trees."""
    follower = _SyncFollower(give)
    subscriptions = (on_synced.subscribe(follower.on_synced), on_change(follower.tell_trees))
    follower.tell_trees()
    if any(any(placement_of(mesh)) for mesh in list_proc_meshes()):
        follower.ask()

    def end() -> None:
        for subscription in subscriptions:
            subscription.close()
        follower.ended = True

    return end


class _SyncFollower:
    """Queries ranks on a separate thread, one at a time, because busy ranks answer late."""

    def __init__(self, give: Give) -> None:
        self._give = give
        self._lock = threading.Lock()
        self._asking = False
        self._again = False
        self.ended = False

    def on_synced(self) -> None:
        self.tell_trees()
        self.ask()

    def tell_trees(self) -> None:
        """Report the trees of all hosts. The board ignores hosts without meshes."""
        for key, (tree, environment) in dict(trees).items():
            self._give(HostFact(key, {"tree": tree, "environment": environment}))

    def ask(self) -> None:
        with self._lock:
            self._again = True
            if self._asking:
                return
            self._asking = True
        threading.Thread(target=self._run, name="monarch-watch-syncs", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._again or self.ended:
                    self._asking = False
                    return
                self._again = False
            for mesh in list_proc_meshes():
                try:
                    self._tell(mesh)
                except Exception as e:  # the mesh is ending, or a rank does not answer: keep the last state
                    log.debug("the older modules of %s are unknown: %s", mesh.name, e)

    def _tell(self, mesh: ProcMesh) -> None:
        from workspace_sync.reload.client import stale_modules

        whole = whole_of(mesh).procs
        stale = stale_modules(whole, timeout=ASK_TIMEOUT)
        older = {rank for module in stale for rank in parse_ranks(module.ranks, whole.extent)}
        if not self.ended:
            procs = whole._target().procs
            self._give(*(ProcFact(ref.id, {"older": rank in older}) for rank, ref in enumerate(procs)))
