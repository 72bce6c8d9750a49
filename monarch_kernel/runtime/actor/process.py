"""Hold the actor system of this process, and define the protocols through which the modules below it use it.

``system.ActorSystem`` is built from actors, ports, meshes and healing, and each of these needs the system of its
process. They all import this module, and use the system through the protocol ``System``; only this module holds the
object. It does not know how to create one: ``system`` registers a factory when it is imported.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from monarch_kernel.runtime.node.poller import FORKED

if TYPE_CHECKING:
    from monarch_kernel.protocol.messages import Call, Death, Launch, ProcRef
    from monarch_kernel.runtime.actor.calls.caster import Caster
    from monarch_kernel.runtime.actor.calls.target import ReportedDeaths, Target
    from monarch_kernel.runtime.actor.errors import MeshFailure
    from monarch_kernel.runtime.actor.execution.instance import ActorInstance, Instance
    from monarch_kernel.runtime.actor.execution.message_gate import MessageGate
    from monarch_kernel.runtime.actor.healing.healer import Healer
    from monarch_kernel.runtime.actor.healing.held_calls import HeldCalls
    from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh
    from monarch_kernel.runtime.actor.hosts.placing import Placements
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
    from monarch_kernel.runtime.actor.ports.holders import PortHolders
    from monarch_kernel.runtime.actor.wire_types import Body, Buffers, MessageLink
    from monarch_kernel.runtime.mesh.shape import Extent
    from monarch_kernel.runtime.node.future import Future
    from monarch_kernel.runtime.node.node import Node
    from monarch_kernel.runtime.supervision import Tree


class SpawnedMesh(Protocol):
    """The part of a spawned mesh of procs or actors that its actor uses."""

    def _target(self) -> Target: ...
    def _stop(self, reason: str) -> Future[Any]: ...


class System(Protocol):
    """The part of the system that the actor runtime uses; ``system.ActorSystem`` documents the attributes."""

    node: Node
    root: ProcRef
    pid: int
    is_root: bool
    finalizing: list[weakref.ref[Any]]
    agent: ProcRef | None
    launch: Launch | None
    own_agents: set[str]
    agent_answers: Future[bool] | None
    agent_env: dict[str, str]
    workers: dict[str, ProcRef]
    placements: Placements
    output_sinks: list[Callable[[str, int, bytes | None], None]]
    tree: Tree
    proc_meshes: dict[str, ProcMesh]
    kept_from: set[str]
    reported: ReportedDeaths
    caster: Caster
    ended: dict[str, Death]
    _closed: bool

    @property
    def actors(self) -> Mapping[str, ActorInstance]: ...
    @property
    def client(self) -> Instance: ...
    @property
    def held_calls(self) -> HeldCalls: ...
    @property
    def gate(self) -> MessageGate: ...
    @property
    def ports(self) -> PortHolders: ...
    @property
    def healer(self) -> Healer: ...

    def reply(self, link: MessageLink, message: Call, status: int, body: Body, buffers: Buffers = ()) -> None: ...
    def reply_dead(self, link: MessageLink, message: Call, death: Death) -> None: ...
    def start_local_actor(self, actor: str, name: str, cls: type) -> None: ...
    def actor_ended(self, instance: ActorInstance) -> None: ...
    def note_interrupt(self, instance: ActorInstance) -> None: ...
    def was_interrupted(self, instance: ActorInstance) -> bool: ...
    def signal_main_thread(self, attempts: int = 20) -> None: ...
    def pass_up(self, instance: ActorInstance, failure: MeshFailure) -> None: ...
    def fault_at_root(self, failure: MeshFailure) -> None: ...
    def changed(self) -> None: ...
    def ensure_agent(self) -> ProcRef: ...
    def this_proc(self) -> ProcMesh: ...
    def proc_mesh_of(self, name: str, procs: tuple[ProcRef, ...], extent: Extent) -> ProcMesh: ...
    def this_host(self) -> HostMesh: ...


_system: System | None = None
_make_controller: Callable[[], System] | None = None
#: The id of the actor that creates the singletons of a job, in its controller.
CONTROLLERS = "controllers"
#: Held while the system of this process is created or ended.
lock = threading.RLock()


def get_system() -> System:
    """Return this process's system; a process that has none becomes a controller.

    Raises:
        RuntimeError: the runtime is not loaded, or this process is a fork of a process that has a system.
    """
    system = _system
    if system is not None:
        if system.pid == os.getpid():
            return system
        raise RuntimeError(FORKED)
    return _become_controller()


def current_system() -> System | None:
    """Return this process's system, or the system of the process it was forked from; None if there is none."""
    return _system


def started() -> bool:
    """Return whether this process has a running system."""
    return _system is not None and not _system._closed


def set_system(system: System | None) -> None:
    """Install the system of this process. A rank does this when it starts."""
    global _system
    _system = system


def set_controller_factory(make: Callable[[], System]) -> None:
    """Register ``make()``, which creates the system of a new controller; ``system`` calls this when it is imported."""
    global _make_controller
    _make_controller = make


def _become_controller() -> System:
    global _system
    with lock:
        if _system is None:
            if _make_controller is None:
                raise RuntimeError("this process has not loaded the actor runtime: import monarch_kernel.actor first")
            _system = _make_controller()
        return _system
