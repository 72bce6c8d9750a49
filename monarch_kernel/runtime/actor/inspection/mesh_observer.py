"""Report the state of a controller's meshes as it changes, as known to it and its host agents. The source of all views.

An observer costs nothing until it is opened. It requests reports from the host agents of all meshes, by a lease that it
renews. It continues if the runtime of the controller restarts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from monarch_kernel.protocol.messages import Death, ProcUnresponsive
from monarch_kernel.protocol.observation import Observe, Observed, ProcFigures, RankActivity
from monarch_kernel.protocol.refs import ProcRef
from monarch_kernel.runtime.actor import process
from monarch_kernel.runtime.actor import system as systems
from monarch_kernel.runtime.actor.wire_types import Body, MessageLink
from monarch_kernel.subscriptions import Subscription

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
    from monarch_kernel.runtime.actor.process import System
    from monarch_kernel.runtime.mesh.shape import Extent

T = TypeVar("T")


#: How long host agents report without a renewal (seconds).
LEASE = 30.0
#: Smaller differences between clocks of hosts are ignored (seconds), because messages take time, too.
SAME_CLOCK = 0.05


class ObservedMesh(NamedTuple):
    """A proc mesh of this controller.

    Attributes:
        key: unique, and constant as long as the mesh exists.
        procs: the current proc of each rank.
        pids: the process ids of procs known to run; 0 for others.
        mesh: the mesh itself.
    """

    key: str
    name: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    procs: tuple[ProcRef, ...]
    pids: tuple[int, ...]
    mesh: Any


class ObserverEvents(Protocol):
    """Callbacks of an observer, called on the thread on which something becomes known. They must be fast."""

    def meshes_changed(self, changed: Sequence[ObservedMesh], gone: Sequence[str]) -> None:
        """Handle meshes that are new or have other procs, and meshes that are gone."""
        ...

    def proc_died(self, proc: str, death: Death) -> None:
        """Handle that a proc of a mesh has died, or was stopped."""
        ...

    def host_lost(self, agent: str, death: Death) -> None:
        """Handle the loss of the host agent of some ranks."""
        ...

    def proc_vitals(self, proc: str, report: ProcUnresponsive | None) -> None:
        """Handle that a proc does not answer its agent, or (None) answers again."""
        ...

    def procs_healing(self, procs: frozenset[str], begins: bool) -> None:
        """Handle the beginning or end of the healing of procs, or of actors on them."""
        ...

    def host_reported(self, agent: str, report: Observed, ahead: float) -> None:
        """Handle a report of a host agent. Its clock is ``ahead`` seconds ahead of the local clock."""
        ...


class MeshObserver:
    """Reports changes between ``open`` and ``close``.

    Args:
        events: the callbacks.
        period: the minimum interval between two reports of one host (seconds).
    """

    def __init__(self, events: ObserverEvents, period: float) -> None:
        self._events = events
        self._period = period
        self._lock = threading.RLock()
        self._open = False
        self._system: System | None = None
        self._targets: dict[str, Any] = {}  # by mesh: the target last told
        self._procs: set[str] = set()
        self._agents: dict[str, ProcRef] = {}
        self._ahead: dict[str, float] = {}  # by agent: how far its clock is ahead
        self._early: dict[str, _Early] = {}  # reports on procs that no mesh here has yet
        self._asked: dict[str, float] = {}  # by agent: when the lease was last renewed
        self._number = 1  # of the last request for everything
        self._changes: Subscription | None = None
        self._healing: Subscription | None = None

    def open(self) -> None:
        """Start. The current state is reported before this returns."""
        self._open = True
        self._changes = systems.mesh_changes.subscribe(self._sync)
        self._sync()

    def close(self) -> None:
        """Stop: host agents stop reporting, and no more callbacks are called."""
        if not self._open:
            return
        if self._changes is not None:
            self._changes.close()
        with self._lock:
            self._open = False
            agents = list(self._agents)
            system = self._system
            self._unbind()
        if system is not None and not system._closed and system.pid == os.getpid():  # a fork only forgets
            self._ask(system, agents, 0.0)

    @property
    def period(self) -> float:
        """The minimum interval between two reports of one host (seconds)."""
        return self._period

    @period.setter
    def period(self, value: float) -> None:
        if value != self._period:
            self._period = value
            self._renew()

    def ask_again(self) -> int:
        """Request a full report from all hosts and ranks. Reports with this number or a later one are answers."""
        with self._lock:
            system, agents = self._system, list(self._agents)
            self._number += 1
            number = self._number
        if system is not None:
            self._ask(system, agents, LEASE, again=True)
        return number

    # -- the system of this process -----------------------------------------------------------------

    def _bind(self, system: System) -> None:
        self._system = system
        node = system.node
        node.on_peer_dead.append(self._on_peer_dead)
        node.on_vitals.append(self._on_vitals)
        node.on_close.append(self._on_close)
        node.handle(Observed, self._on_observed)
        self._healing = system.healer.on_healing.subscribe(self._on_healing)

    def _unbind(self) -> None:
        """Forget the system and its state."""
        system = self._system
        if system is None:
            return
        node = system.node
        _remove(node.on_peer_dead, self._on_peer_dead)
        _remove(node.on_vitals, self._on_vitals)
        _remove(node.on_close, self._on_close)
        # Reports in transit are dropped without an error.
        node.handle(Observed, _ignore)
        if self._healing is not None:
            self._healing.close()
        self._system = self._healing = None
        self._targets, self._procs, self._agents, self._ahead, self._early = {}, set(), {}, {}, {}
        self._asked = {}

    def _on_close(self) -> None:
        with self._lock:
            gone = list(self._targets)
            self._unbind()
            if gone and self._open:
                self._events.meshes_changed((), gone)

    def _renew(self) -> None:
        with self._lock:
            system, agents = self._system, list(self._agents)
        if system is not None:
            self._ask(system, agents, LEASE)

    def _ask(self, system: System, agents: Sequence[str], lease: float, again: bool = False) -> None:
        """Send the lease, without the lock: a message handler that holds a link may wait for the lock."""
        for agent in agents:
            self._asked[agent] = time.monotonic()
            if agent not in system.node.deaths:
                system.node.send(agent, Observe(lease, self._period, again, self._number if again else 0))

    def _sync(self) -> None:
        """Report changed meshes, and request reports from new hosts."""
        with self._lock:
            if not self._open:
                return
            system = process.current_system() if process.started() else None
            if system is not self._system:
                self._on_close()
                if system is not None:
                    self._bind(system)
            if system is None:
                return
            node = system.node
            meshes = {
                uid: mesh for uid, mesh in list(system.proc_meshes.items()) if not mesh._stopped and not mesh._tool
            }
            targets = {uid: mesh._target() for uid, mesh in meshes.items()}
            changed = [
                _observed(uid, mesh, targets[uid].extent, targets[uid].procs, node.pids)
                for uid, mesh in meshes.items()
                if self._targets.get(uid) is not targets[uid]
            ]
            gone = [uid for uid in self._targets if uid not in meshes]
            if not changed and not gone:
                return
            self._targets = targets
            known = self._procs
            refs = {ref.id: ref for target in targets.values() for ref in target.procs}
            self._procs = set(refs)
            agents = {ref.agent: ref.agent_ref() for ref in refs.values() if ref.agent != node.id}
            new = [agent for agent in agents if agent not in self._agents]
            left = [agent for agent in self._agents if agent not in agents]
            self._agents = agents
            self._events.meshes_changed(changed, gone)
            for proc in refs.keys() - known:  # what became known before the mesh
                if proc in node.deaths:
                    self._events.proc_died(proc, node.deaths[proc])
                elif proc in node.unresponsive:
                    self._events.proc_vitals(proc, node.unresponsive[proc])
                if early := self._early.pop(proc, None):
                    agent, figures, activity = early
                    self._tell(agent, Observed(0.0, None, [figures] if figures else [], activity))
            if healing := refs.keys() & system.healer.healing - known:
                self._events.procs_healing(frozenset(healing), True)
            for agent in new:
                node.learn(agents[agent])
                if agent in node.deaths:
                    self._events.host_lost(agent, node.deaths[agent])
        self._ask(system, new, LEASE, again=True)
        self._ask(system, left, 0.0)

    # -- what becomes known -------------------------------------------------------------------------

    def _on_peer_dead(self, proc: str, death: Death) -> None:
        with self._lock:
            self._early.pop(proc, None)
            if proc in self._procs:
                self._events.proc_died(proc, death)
            elif proc in self._agents:
                self._events.host_lost(proc, death)

    def _on_vitals(self, proc: str, report: ProcUnresponsive | None) -> None:
        with self._lock:
            if proc in self._procs:
                self._events.proc_vitals(proc, report)

    def _on_observed(self, link: MessageLink, report: Observed, _body: Body) -> None:
        with self._lock:
            if link.peer not in self._agents:
                return
            system, due = self._system, time.monotonic() - self._asked.get(link.peer, 0.0) > LEASE / 3
            # Transit time makes a clock appear slow, so the largest difference is the most accurate.
            ahead = report.time - time.time()
            self._ahead[link.peer] = max(ahead, self._ahead.get(link.peer, ahead))
            for figures in report.procs:
                if figures.proc not in self._procs:
                    _, _, activity = self._early.get(figures.proc, (link.peer, None, {}))
                    self._early[figures.proc] = (link.peer, figures, activity)
            for proc, new in report.activity.items():
                if proc not in self._procs:
                    _, figures, earlier = self._early.get(proc, (link.peer, None, {}))
                    self._early[proc] = (link.peer, figures, {proc: earlier[proc].joined(new) if earlier else new})
            self._tell(link.peer, report)
        if due and system is not None:  # without a timer, which would add a small cost to every message
            self._ask(system, [link.peer], LEASE)

    def _tell(self, agent: str, report: Observed) -> None:
        ahead = self._ahead.get(agent, 0.0)
        self._events.host_reported(agent, report, ahead if abs(ahead) > SAME_CLOCK else 0.0)

    def _on_healing(self, procs: frozenset[str], begins: bool) -> None:
        with self._lock:
            if mine := procs & self._procs:
                self._events.procs_healing(mine, begins)


#: The agent that has reported, and its report on a process and its actors.
_Early: TypeAlias = tuple[str, ProcFigures | None, dict[str, RankActivity]]


def _remove(callbacks: list[T], callback: T) -> None:
    if callback in callbacks:
        callbacks.remove(callback)


def _observed(
    key: str, mesh: ProcMesh, extent: Extent, procs: tuple[ProcRef, ...], pids: dict[str, int]
) -> ObservedMesh:
    return ObservedMesh(
        key, mesh.name, extent.names, extent.shape, procs, tuple(pids.get(r.id, 0) for r in procs), mesh
    )


def _ignore(_link: MessageLink, _report: Observed, _body: Body) -> None:
    """Ignore a report that arrives after the last observer was closed."""
