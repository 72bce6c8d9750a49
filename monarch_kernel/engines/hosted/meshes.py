"""Mesh handles for meshes whose messages another runtime carries. Calls are those of this package's handles."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import psutil

from monarch_kernel.actor import ActorMesh, Extent, Future, HostMesh, ProcMesh, ValueMesh
from monarch_kernel.engines.interface import NotOffered
from monarch_kernel.output import calling_origin
from monarch_kernel.protocol.messages import OK, Create, ProcStatus, StopActor
from monarch_kernel.protocol.refs import ProcRef
from monarch_kernel.protocol.serialize import dumps_flat, explain, loads
from monarch_kernel.runtime.actor.calls.pending import ManyCall, send_to_all
from monarch_kernel.runtime.actor.calls.target import ReportedDeaths
from monarch_kernel.runtime.actor.meshes.actor_mesh import settled
from monarch_kernel.runtime.mesh.shape import Region
from monarch_kernel.runtime.node.node import Node

if TYPE_CHECKING:
    from monarch_kernel.engines.hosted.controller import ToolController

T = TypeVar("T")

HOST = socket.gethostname()


def done(system: Any, value: object, what: str = "") -> Future[Any]:
    """Return a future that already has this value."""
    future: Future[object] = Future(system.node.poller, what)
    future._resolve(value)
    return future


class _Nothing:
    """The calls that wait for a heal, and the casts to other hosts: an attached process has none."""

    active = False

    def plan(self, _procs: tuple[ProcRef, ...]) -> None:
        """Return None: each proc gets messages directly."""


class AttachedSystem:
    """The parts of an actor system that handles of actors need in an attached process.

    Args:
        node: the node of the tools in this process.
    """

    held_calls = caster = _Nothing()

    def __init__(self, node: Node) -> None:
        self.node = node
        self.reported = ReportedDeaths()
        self.proc_meshes: dict[str, Any] = {}


_system: Any = None


def set_system(system: object) -> None:
    """Set the system for handles that are unpickled in this process: its own one in a controller."""
    global _system
    _system = system


def _get_system() -> Any:
    """Return the system for handles that are unpickled in this process.

    Raises:
        RuntimeError: no tools of another engine run in this process.
    """
    if _system is None:
        raise RuntimeError("this handle belongs to a mesh of another engine, whose tools do not run in this process")
    return _system


class HostedActorMesh(ActorMesh[T]):
    """A mesh of a tool's actors."""

    #: In its controller: the mesh that it is on.
    _of: HostedProcMesh | None = None

    def _stop(self, reason: str) -> Future[object]:
        call = ManyCall(self._system.node, f"{self._name}.stop", self._target())
        send_to_all(self._system, self._target(), StopActor(self._actor, call._number, 0, reason), sink=call)
        if self._of is not None:
            self._of._tools.stopped(self._of, self._actor)
        return settled(call)

    def _new_with_region(self, region: Region) -> ActorMesh[T]:
        mesh: Any = super()._new_with_region(region)
        mesh._of = self._of
        return mesh

    def __reduce__(self) -> object:
        cls = self._cls_or_pickle
        body = cls if isinstance(cls, bytes) else dumps_flat(cls)
        parts = (self._actor, self._name, self._mesh_name, body, self._procs, self._shape, self._spawned)
        return _rebuild_actors, parts


def _rebuild_actors(
    actor: str,
    name: str,
    mesh_name: str,
    cls: bytes,
    procs: tuple[ProcRef, ...],
    region: Region,
    spawned: Extent,
) -> HostedActorMesh[Any]:
    return HostedActorMesh(_get_system(), actor, name, mesh_name, loads(cls), procs, region, None, spawned)


class HostedProcMesh(ProcMesh):
    """A mesh of procs of another runtime, on which tools can spawn actors."""

    def _new_with_region(self, region: Region) -> HostedProcMesh:
        mesh = HostedProcMesh(
            self._system, self._mesh_uid, self.name, self._procs, region, self._host_region, self._owner, self._ready
        )
        mesh._shared = self._shared
        return mesh

    @property
    def _tools(self) -> ToolController:
        controller = self._shared.get("tools")
        if controller is None:
            raise NotOffered(f"mesh {self.name}: only its controller can start and end its processes")
        return controller

    def _not_offered(self, what: str) -> NoReturn:
        raise NotOffered(f"mesh {self.name} {self._tools.MESHES.format(self._tools.engine_name)} {what}")

    def spawn(self, name: str, cls: type[T], *args: object, **kwargs: object) -> ActorMesh[T]:
        """Create one actor of a tool in every proc. User code spawns actors with the other runtime's own meshes.

        Dead procs do not block calls to live ones: calls to actors on dead procs fail, as on procs that die later.
        """
        if self._stopped:
            raise RuntimeError(f"proc mesh {self.name} was stopped: spawn on a new one")
        node, target = self._system.node, self._target()
        extent = target.extent
        actor = f"{name}-{os.urandom(4).hex()}"
        mesh: HostedActorMesh[T] = HostedActorMesh(
            self._system, actor, name, self.name, cls, target.procs, Region.from_extent(extent)
        )
        if mesh._spec.is_async or not mesh._spec.tool:
            self._not_offered(f"run {cls.__name__}: the tools' way into its ranks takes sync actors of tools only")
        try:
            body = dumps_flat((cls, args, kwargs))
        except Exception as error:
            explain(error, f"{cls.__name__} or an argument of its constructor")
            raise
        call = ManyCall(node, f"{name}.__init__", target, True)
        for rank, ref in enumerate(target.procs):
            if ref.id in node.deaths:
                call.on_reply(rank, OK, dumps_flat(None), ())
        create = Create(actor, name, call._number, 0, extent.names, extent.shape, "", node.ref, cell=calling_origin())
        mesh._of = self
        self._tools.spawned(self, create, body)
        send_to_all(self._system, target, create, body, call)
        mesh._ready = call.then(lambda _values: None)
        return mesh

    # -- life --------------------------------------------------------------------------------------

    def _stop(self, reason: str) -> Future[object]:
        return self._tools.stop_procs(self, reason)

    def kill(self, reason: str = "") -> Future[None]:
        """Kill these procs with SIGKILL."""
        return self._tools.kill_procs(self, reason)

    def heal(self, hosts: object = None, timeout: float = 0.0) -> NoReturn:
        """Raise `NotOffered`: the other runtime does not replace procs."""
        self._not_offered("replace dead ranks")

    def _ask_agents(self, message: object, what: str) -> NoReturn:
        self._not_offered(what)

    def _ask_procs(self, message: object, what: str) -> Future[object]:
        return super()._ask_procs(message, what) if what == "interrupt" else self._not_offered(what)

    def status(self) -> Future[ValueMesh[ProcStatus]]:
        """Return state, pid, memory and CPU use of every proc; for procs on other hosts, only state and pid."""
        target = self._target()
        return done(self._system, ValueMesh(target.extent, [self._status(ref) for ref in target.procs]))

    def _status(self, ref: ProcRef) -> ProcStatus:
        node = self._system.node
        pid = node.pids.get(ref.id, 0)
        death = node.deaths.get(ref.id)
        if death is not None:
            return ProcStatus(ref.id, "dead", pid, ref.host, death.cause)
        if not pid or ref.host != HOST:
            return ProcStatus(ref.id, "alive" if pid else "starting", pid, ref.host)
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                age = max(0.001, time.time() - process.create_time())
                times = process.cpu_times()
                busy = 100 * (times.user + times.system) / age
                return ProcStatus(ref.id, "alive", pid, ref.host, "", process.memory_info().rss, busy, age)
        except psutil.Error:
            return ProcStatus(ref.id, "alive", pid, ref.host)

    @property
    def host_mesh(self) -> NoReturn:
        """Raise `NotOffered`: the hosts belong to the other runtime."""
        self._not_offered("give its hosts to the tools")

    def __reduce__(self) -> object:
        return _rebuild_procs, (self._mesh_uid, self.name, self._procs, self._shape, self._host_region)


def _rebuild_procs(uid: str, name: str, procs: tuple[ProcRef, ...], region: Region, hosts: Region) -> ProcMesh:
    system = _get_system()
    known = system.proc_meshes.get(uid)
    if known is not None and known._region == region:
        return known
    return HostedProcMesh(system, uid, name, procs, region, hosts)


class HostedHostMesh(HostMesh):
    """Hosts of another runtime, with the methods that ``%mesh up`` needs.

    Args:
        controller: the tools of this process.
        engine_name: the name of the other runtime for users.
    """

    def __init__(self, controller: ToolController) -> None:
        self._controller = controller

    @property
    def _region(self) -> Region:
        return Region.from_extent(Extent((), ()))

    def with_python_executable(self, python: object) -> NoReturn:
        """Raise `NotOffered`."""
        raise NotOffered(f"{self._controller.engine_name} starts ranks with the interpreter of the kernel only")

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Any = None,
        name: str | None = None,
        proc_bind: object = None,
        bootstrap_command: object = None,
        *,
        env: Mapping[str, str | None] | None = None,
        preload: Sequence[str] = (),
        restart: object = "never",
        spares: object = None,
        devices: int = 0,
    ) -> ProcMesh:
        """Start procs on every host; see ``HostMesh.spawn_procs``.

        Raises:
            NotOffered: for restart policies, spare hosts, other interpreters, and GPUs per process.
        """
        if devices:
            raise NotOffered(f"{self._controller.engine_name} gives each process all GPUs: leave devices out")
        if restart != "never" or spares is not None:
            raise NotOffered(f"{self._controller.engine_name} restarts no ranks: leave restart and spares out")
        if bootstrap_command is not None or proc_bind is not None or bootstrap is not None:
            raise NotOffered("give bootstrap, bootstrap_command and proc_bind to the engine's own spawn_procs")
        return self._controller.start_procs(name or "procs", dict(per_host or {}), dict(env or {}), tuple(preload))
