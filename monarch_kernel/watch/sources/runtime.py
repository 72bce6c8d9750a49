"""Facts from the runtime: meshes, deaths, unresponsive ranks, and reports of host agents and ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from monarch_kernel.introspection import (
    ActorActivity,
    Death,
    MeshObserver,
    Observed,
    ObservedMesh,
    ProcUnresponsive,
)
from monarch_kernel.meshes import kept_host_of
from monarch_kernel.watch.facts import (
    ActorsFact,
    CellFact,
    Condition,
    Fact,
    FailureFact,
    HostFact,
    MeshFact,
    MeshGone,
    ProcFact,
)
from monarch_kernel.watch.model import ActorView, GpuView, RankState
from monarch_kernel.watch.sources import Give


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
    since: Any = actor.since and actor.since - ahead
    return ActorView(actor.name, actor.cls, actor.endpoint, since, actor.waiting, actor.calls, actor.failures)
