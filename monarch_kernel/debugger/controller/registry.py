"""What a debugger knows of its meshes: who is stopped, who is dead; and how its viewers hear of it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.debugger.controller.hub_actor import hub_actor
from monarch_kernel.debugger.controller.viewers import Viewers
from monarch_kernel.debugger.controller.votes import Differs, First
from monarch_kernel.debugger.events import (
    Event,
    MeshBreakpoint,
    RankGone,
    RankRanOff,
    RankResumed,
    RankStop,
    RankStopped,
)
from monarch_kernel.debugger.model.stops import Stop
from monarch_kernel.debugger.rank.agent import DebugAgent
from monarch_kernel.meshes import list_proc_meshes, on_change
from monarch_kernel.tools import Whole, hosts_of, whole_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Watched:
    """A mesh with agents."""

    whole: Whole
    name: str
    agents: Any
    stops: dict[tuple[int, int], RankStop] = field(default_factory=dict[tuple[int, int], RankStop])
    over: dict[int, deque[int]] = field(default_factory=dict[int, "deque[int]"])  # the last stops that are over
    dead: set[int] = field(default_factory=set[int])
    unarmed: dict[int, int] = field(default_factory=dict[int, int])  # who could not be told what to stop at; tries
    votes: dict[int, Differs | First] = field(default_factory=dict[int, Differs | First])


class Watching:
    """The meshes with agents, and what their ranks have told. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._watched: dict[str, Watched] = {}
        self._breakpoints: dict[int, MeshBreakpoint] = {}
        self._next = 0
        self._subscribers: list[Callable[[Event], None]] = []
        self._hub: Any = None
        self._unsubscribe: Callable[[], None] | None = None
        self.viewers = Viewers()

    # -- meshes ----------------------------------------------------------------------------------

    def actor(self) -> Any:
        """The actor that hears of stops."""
        if self._hub is None:
            hub = hub_actor()
            with self._lock:
                if self._hub is None:
                    self._hub = hub
                    # Whoever polls calls this, and must not be kept: the actor's thread does the work.
                    self._unsubscribe = on_change(lambda: hub.changed.broadcast())
        return self._hub

    def close(self) -> None:
        """The runtime ends."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        with self._lock:
            self._watched.clear()
        self._tell()

    def watch(self, mesh: Any) -> str:
        """Put agents on a mesh, if there are none; does not wait for them. Gives the name that the mesh has here."""
        return self.watched(whole_of(mesh)).name

    def watched(self, whole: Whole) -> Watched:
        """The same for a whole mesh; gives what is known of it."""
        hub = self.actor()  # which may have to be made, and not under the lock
        with self._lock:  # what the agents have to tell is heard when they are known here
            watched = self._watched.get(whole.uid)
            if watched is None:
                taken = {each.name for each in self._watched.values()}
                name = whole.procs.name
                while name in taken:
                    name += "'"
                agents = whole.procs.spawn("debugger", DebugAgent, hub, whole.uid, name)
                watched = self._watched[whole.uid] = Watched(whole, name, agents)
            return watched

    def _by_name(self, mesh: str | None) -> list[Watched]:
        with self._lock:
            found = [each for each in self._watched.values() if mesh in (None, each.name)]
        if mesh is not None and not found:
            for procs in reversed(list_proc_meshes()):
                if procs.name == mesh:
                    self.watch(procs)
                    return self._by_name(mesh)
            known = ", ".join(procs.name for procs in list_proc_meshes()) or "none"
            raise ValueError(f"there is no mesh {mesh!r}; there are {known}")
        return found

    # -- events (on the actor's thread) ------------------------------------------------------------

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Have ``callback(event)`` called for every event, on a thread of the debugger; it must not block.

        Returns:
            A function that ends this.
        """
        with self._lock:
            self._subscribers.append(callback)

        def end() -> None:
            with self._lock:
                if callback in self._subscribers:
                    self._subscribers.remove(callback)

        return end

    def _tell(self, *events: Event) -> None:
        with self._lock:
            self._changed.notify_all()
            subscribers = list(self._subscribers)
        for event in events:
            for callback in subscribers:
                try:
                    callback(event)
                except Exception:
                    log.exception("a viewer of the debugger failed at %s", event)

    def on_joined(self, uid: str, rank: int, pid: int, stops: Sequence[Stop]) -> None:
        """An agent has begun in a rank (again, where the rank was replaced)."""
        with self._lock:
            watched = self._watched.get(uid)
            if watched is None:
                return
            watched.dead.discard(rank)  # it was replaced
            self._forget_bound(watched, rank)
        for stop in stops:
            self.on_stopped(uid, rank, pid, stop)
        self._rank_began(watched, rank)

    def _rank_began(self, watched: Watched, rank: int) -> None:
        """A rank has an agent now, and knows of no breakpoint yet."""

    def _forget_bound(self, watched: Watched, rank: int) -> None:
        """What a process has made of its breakpoints ends with it; the lock is held."""
        for each in self._breakpoints.values():
            each.bound.pop((watched.name, rank), None)

    def on_stopped(self, uid: str, rank: int, pid: int, stop: Stop) -> None:
        """A rank has stopped."""
        with self._lock:
            watched = self._watched.get(uid)
            if watched is None or stop.id in watched.over.get(rank, ()):
                return
            extent = watched.whole.procs.extent
            point = dict(extent.point(rank).items())
            at = RankStop(watched.name, rank, point, hosts_of(watched.whole.procs)[rank], pid, stop)
            known = (rank, stop.id) in watched.stops
            watched.stops[rank, stop.id] = at
        if not known:
            self._tell(RankStopped(at))

    def on_resumed(self, uid: str, rank: int, stop: int, how: str) -> None:
        """A rank goes on."""
        event: Event | None = None
        with self._lock:
            watched = self._watched.get(uid)
            if watched is None:
                return
            if how == "ran off":
                event = RankRanOff((watched.name, rank, stop))
            else:
                watched.over.setdefault(rank, deque(maxlen=64)).append(stop)
                at = watched.stops.pop((rank, stop), None)
                if at is not None:
                    event = RankResumed(at.key, how)
                    vote = watched.votes.get(at.stop.breakpoint)
                    if isinstance(vote, First):
                        vote.released(rank)
        if event is not None:
            self._tell(event)

    def on_meshes_changed(self) -> None:
        """Meshes were made or stopped, or ranks have died."""
        events: list[Event] = []
        with self._lock:
            live = {whole_of(mesh).uid: mesh for mesh in list_proc_meshes()}
            for uid, watched in list(self._watched.items()):
                stopped = uid not in live and getattr(watched.whole.procs, "_stopped", False)
                dead = dict.fromkeys(range(len(watched.whole.procs)), "stopped") if stopped else {}
                dead.update(watched.whole.procs.dead())
                for rank in sorted(set(dead) - watched.dead):
                    watched.dead.add(rank)
                    watched.over.pop(rank, None)
                    self._forget_bound(watched, rank)
                    events.append(RankGone(watched.name, rank, dead[rank]))
                    for vote in watched.votes.values():
                        if isinstance(vote, First):
                            vote.released(rank)
                    for (of, number), at in list(watched.stops.items()):
                        if of == rank:
                            del watched.stops[of, number]
                            events.append(RankResumed(at.key, "gone"))
                if stopped:
                    del self._watched[uid]
            new = [mesh for uid, mesh in live.items() if uid not in self._watched]
        self._tell(*events)
        for mesh in new:
            self.joined_later(mesh)

    def joined_later(self, mesh: Any) -> None:
        """Like `joined`, without waiting for the ranks: whoever starts a mesh and wants to be sure calls that."""
        with self._lock:
            wanted = any(each.mesh is None for each in self._breakpoints.values())
        if wanted:
            self.watch(mesh)  # its agents say when they have begun, and are armed then

    # -- votes (on the actor's thread) ---------------------------------------------------------------

    def on_vote(self, uid: str, rank: int, number: int, hit: int, value: str) -> dict[int, bool]:
        """A rank has come to a breakpoint on which all decide; see `votes`."""
        with self._lock:
            watched, known = self._watched.get(uid), self._breakpoints.get(number)
            if watched is None or known is None:
                return {rank: False}
            if known.spec.first:
                first = watched.votes.setdefault(number, First())
                return {rank: isinstance(first, First) and first.vote(rank)}
            differs = watched.votes.setdefault(number, Differs())
            everyone = range(len(watched.whole.procs))
            voters = [each for each in everyone if known.holds_on(watched.name, each) and each not in watched.dead]
            return differs.vote(rank, hit, value, voters) if isinstance(differs, Differs) else {rank: False}

    def on_decide(self, uid: str, number: int, hit: int) -> dict[int, bool]:
        """A rank has waited long enough for the others."""
        with self._lock:
            watched = self._watched.get(uid)
            vote = watched.votes.get(number) if watched is not None else None
            return vote.decide(hit) if isinstance(vote, Differs) else {}
