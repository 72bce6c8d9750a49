"""Record the state of debugged meshes: which ranks are stopped or dead. Viewers subscribe here."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from monarch_kernel.debugger.controller.hub_actor import hub_actor
from monarch_kernel.debugger.events import (
    Event,
    Key,
    RankGone,
    RankRanOff,
    RankResumed,
    RankStop,
    RankStopped,
    stop_at_client,
)
from monarch_kernel.debugger.model.stops import Stop
from monarch_kernel.debugger.rank.rank_debugger import DebugAgent
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import Whole, hosts_of, whole_of
from monarch_kernel.meshes import on_change
from monarch_kernel.subscriptions import Subscribers, Subscription

if TYPE_CHECKING:
    from monarch_kernel.actor import ActorMesh, ProcMesh
    from monarch_kernel.debugger.controller.breakpoints import Breakpoints
    from monarch_kernel.debugger.controller.hub_actor import DebugHub

log = logging.getLogger(__name__)

#: A mesh of procs or actors, or the name of a proc mesh.
MeshOrName: TypeAlias = "ProcMesh | ActorMesh[object] | str"

#: How many finished stops of each rank are remembered.
MEMORY = 64


@dataclass(slots=True)
class DebuggedMesh:
    """A mesh with agents.

    Attributes:
        whole: the whole mesh.
        name: its name for viewers; unique among the watched meshes.
        stops: the stops, by rank and id.
        over: the ids of each rank's last finished stops.
        dead: the dead ranks.
    """

    whole: Whole
    name: str
    agents: ActorMesh[DebugAgent]
    stops: dict[tuple[int, int], RankStop] = field(default_factory=dict[tuple[int, int], RankStop])
    over: dict[int, deque[int]] = field(default_factory=dict[int, "deque[int]"])
    dead: set[int] = field(default_factory=set[int])

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.whole.procs)


class StopRegistry:
    """The meshes with agents, and the state of their ranks. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.listener: Breakpoints | None = None
        self._changed = threading.Condition(self.lock)
        self._watched: dict[str, DebuggedMesh] = {}
        self._subscribers: Subscribers[[Event]] = Subscribers("a viewer of the debugger")
        self._hub: ActorMesh[DebugHub] | None = None
        self._unsubscribe: Callable[[], None] | None = None

    # -- meshes ----------------------------------------------------------------------------------

    def actor(self) -> ActorMesh[DebugHub]:
        """Return the hub actor, which receives the stops of ranks. The first call spawns it."""
        if self._hub is None:
            hub = hub_actor()
            with self.lock:
                if self._hub is None:
                    self._hub = hub
                    # The callback runs on a thread that polls and must not block, so the actor's thread does the work.
                    self._unsubscribe = on_change(lambda: hub.changed.broadcast())
        return self._hub

    def close(self) -> None:
        """Forget all meshes, when the runtime ends."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        with self.lock:
            self._watched.clear()
        self.tell()

    def watch(self, mesh: ProcMesh | ActorMesh[object]) -> DebuggedMesh:
        """Spawn agents on a mesh if it has none, without waiting for them."""
        return self.watch_whole(whole_of(mesh))

    def watch_whole(self, whole: Whole) -> DebuggedMesh:
        """Run `watch` for the mesh of a `Whole`."""
        self.actor()
        hub = hub_actor(whole.procs)  # not under the lock, since spawning it takes time
        with self.lock:  # events of the new agents are handled once they are registered here
            watched = self._watched.get(whole.uid)
            if watched is None:
                taken = {each.name for each in self._watched.values()}
                name = whole.procs.name
                while name in taken:
                    name += "'"
                agents = whole.procs.spawn("debugger", DebugAgent, hub, whole.uid, name)
                entire = Whole(whole.procs, tuple(range(len(whole.procs))), whole.uid)
                watched = self._watched[whole.uid] = DebuggedMesh(entire, name, agents)
            return watched

    def watch_all(self) -> None:
        """Spawn agents on all meshes of this controller."""
        for mesh in tool_runtime().list_proc_meshes():
            self.watch(mesh)

    def by_uid(self, uid: str) -> DebuggedMesh | None:
        """Return the watched mesh with that uid; None if it is not watched."""
        with self.lock:
            return self._watched.get(uid)

    def all(self) -> list[DebuggedMesh]:
        """Return all watched meshes."""
        with self.lock:
            return list(self._watched.values())

    def named(self, name: str) -> DebuggedMesh:
        """Return the mesh of that name, and watch it from now on.

        Raises:
            ValueError: there is none.
        """
        for watched in self.all():
            if watched.name == name:
                return watched
        for procs in reversed(tool_runtime().list_proc_meshes()):
            if procs.name == name:
                return self.watch(procs)
        known = ", ".join(procs.name for procs in tool_runtime().list_proc_meshes()) or "none"
        raise ValueError(f"there is no mesh {name!r}; there are {known}")

    def find(self, mesh: MeshOrName) -> DebuggedMesh:
        """Watch a mesh that is passed itself or by name. Raises ValueError if there is no mesh of that name."""
        return self.named(mesh) if isinstance(mesh, str) else self.watch(mesh)

    # -- stops -----------------------------------------------------------------------------------

    def stops(self, mesh: MeshOrName | None = None) -> list[RankStop]:
        """Return all stops, of one mesh or of all, sorted by mesh and rank."""
        name = None if mesh is None else self.find(mesh).name
        with self.lock:
            found = [at for watched in self._watched.values() for at in watched.stops.values()]
        return sorted((at for at in found if name in (None, at.mesh)), key=lambda at: at.key)

    def stop_of(self, key: Key) -> RankStop:
        """Return the stop of that key. Raises LookupError if it is over."""
        with self.lock:
            for watched in self._watched.values():
                if watched.name == key[0] and key[1:] in watched.stops:
                    return watched.stops[key[1], key[2]]
        raise LookupError(f"rank {key[1]} of mesh {key[0]} is not stopped there any more")

    def wait(self, predicate: Callable[[], bool], timeout: float | None) -> None:
        """Wait until the predicate, which is checked after each change, holds or the timeout (seconds) expires."""
        with self._changed:
            self._changed.wait_for(predicate, timeout)

    # -- events ----------------------------------------------------------------------------------

    def subscribe(self, callback: Callable[[Event], None]) -> Subscription:
        """See `hub.MeshDebugger.subscribe`."""
        return self._subscribers.subscribe(callback)

    def tell(self, *events: Event) -> None:
        """Notify all viewers."""
        with self.lock:
            self._changed.notify_all()
        for event in events:
            self._subscribers.notify(event)

    # -- events of ranks (on the thread of the hub actor) ------------------------------------------

    def on_joined(self, uid: str, rank: int, pid: int, stops: Sequence[Stop]) -> None:
        """Handle that an agent has begun in a rank (again, if the rank was replaced)."""
        with self.lock:
            watched = self._watched.get(uid)
            if watched is None:
                return
            watched.dead.discard(rank)
            if self.listener is not None:
                self.listener.on_process_ended(watched, rank)  # the process that this one replaces
        for stop in stops:
            self.on_stopped(uid, rank, pid, stop)
        if self.listener is not None:
            self.listener.on_agent(watched, rank)

    def on_stopped(self, uid: str, rank: int, pid: int, stop: Stop) -> None:
        """Handle that a rank has stopped."""
        stop = stop_at_client(stop)
        with self.lock:
            watched = self._watched.get(uid)
            if watched is None or stop.id in watched.over.get(rank, ()):
                return
            point = dict(watched.whole.procs.extent.point(rank).items())
            at = RankStop(watched.name, rank, point, hosts_of(watched.whole.procs)[rank], pid, stop)
            known = (rank, stop.id) in watched.stops
            watched.stops[rank, stop.id] = at
        if not known:
            self.tell(RankStopped(at))

    def on_resumed(self, uid: str, rank: int, stop: int, how: str) -> None:
        """Handle that a rank has continued."""
        event: Event | None = None
        with self.lock:
            watched = self._watched.get(uid)
            if watched is None:
                return
            if how == "ran off":
                event = RankRanOff((watched.name, rank, stop))
            else:
                if how != "passed on":  # to another viewer, which may pass it back
                    watched.over.setdefault(rank, deque(maxlen=MEMORY)).append(stop)
                at = watched.stops.pop((rank, stop), None)
                if at is not None:
                    event = RankResumed(at.key, how)
                    if self.listener is not None:
                        self.listener.on_stop_ended(watched, at)
        if event is not None:
            self.tell(event)

    def on_meshes_changed(self) -> None:
        """Handle that meshes were created or stopped, or that ranks died or were replaced."""
        events: list[Event] = []
        with self.lock:
            live = {whole_of(mesh).uid: mesh for mesh in tool_runtime().list_proc_meshes()}
            for uid, watched in list(self._watched.items()):
                stopped = uid not in live and getattr(watched.whole.procs, "_stopped", False)
                dead = dict.fromkeys(range(watched.size), "stopped") if stopped else {}
                dead.update(watched.whole.procs.dead())
                for rank in sorted(set(dead) - watched.dead):
                    events += self._ended(watched, rank, dead[rank])
                if stopped:
                    del self._watched[uid]
                    if self.listener is not None:
                        self.listener.on_mesh_ended(watched)
            new = [mesh for uid, mesh in live.items() if uid not in self._watched]
        self.tell(*events)
        if self.listener is not None:
            self.listener.on_new_meshes(new)

    def _ended(self, watched: DebuggedMesh, rank: int, cause: str) -> list[Event]:
        """Handle the death of a rank, which ends its stops; the lock is held. Returns the events for viewers."""
        watched.dead.add(rank)
        watched.over.pop(rank, None)
        if self.listener is not None:
            self.listener.on_process_ended(watched, rank)
        events: list[Event] = [RankGone(watched.name, rank, cause)]
        for (of, number), at in list(watched.stops.items()):
            if of == rank:
                del watched.stops[of, number]
                events.append(RankResumed(at.key, "gone"))
        return events
