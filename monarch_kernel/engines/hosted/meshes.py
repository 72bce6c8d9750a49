"""Mesh handles for meshes whose messages another runtime carries. Only sending differs from this package's handles."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import psutil

from monarch_kernel.actor import ActorMesh, Endpoint, Extent, Future, HostMesh, ProcMesh, ValueMesh
from monarch_kernel.engines.hosted import wire
from monarch_kernel.engines.hosted.message_node import MessageNode, MessageSystem, message_system
from monarch_kernel.engines.interface import NotOffered
from monarch_kernel.output import calling_origin
from monarch_kernel.protocol.messages import DEAD, OK, ProcStatus
from monarch_kernel.protocol.refs import ProcRef
from monarch_kernel.protocol.serialize import dumps_flat, explain, loads
from monarch_kernel.runtime.actor.calls.pending import ManyCall, OneCall, StreamCall
from monarch_kernel.runtime.actor.meshes.actor_mesh import settled
from monarch_kernel.runtime.mesh.shape import Region

if TYPE_CHECKING:
    from monarch_kernel.engines.hosted.controller import ToolController

T = TypeVar("T")

HOST = socket.gethostname()


def done(system: MessageSystem, value: Any, what: str = "") -> Future[Any]:
    """Return a future that already has this value."""
    future: Future[Any] = Future(system.node.poller, what)
    future._resolve(value)
    return future


class HostedEndpoint(Endpoint[Any]):
    """An endpoint of a tool's actors, with the methods of `Endpoint`. The other runtime carries its messages."""

    __slots__ = ()

    _node: MessageNode  # pyright: ignore[reportIncompatibleVariableOverride]  # of the other runtime's system

    def call(self, *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """See `Endpoint`."""
        body = self._packed(args, kwargs)
        call = ManyCall(cast("Any", self._node), self._label, self._mesh._target())
        self._to_all(body, call)
        return call

    def call_one(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Endpoint`."""
        count = len(self._mesh._target().procs)
        if count != 1:
            raise ValueError(f"call_one requires exactly 1 actor, but mesh has {count}: slice it to one, or use call")
        return self._to_one(0, args, kwargs)

    def choose(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Endpoint`."""
        return self._to_one(random.randrange(len(self._mesh._target().procs)), args, kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> StreamCall:
        """See `Endpoint`."""
        body = self._packed(args, kwargs)
        call = StreamCall(cast("Any", self._node), self._label, self._mesh._target())
        self._to_all(body, call)
        return call

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """See `Endpoint`. An exception in the endpoint is dropped."""
        self._to_all(self._packed(args, kwargs), None)

    # -- sending -----------------------------------------------------------------------------------

    def _packed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        if self._spec is not None:
            self._spec.check(args, kwargs)
        try:
            return dumps_flat((args, kwargs))
        except Exception as error:
            explain(error, f"an argument of {self._label}")
            raise

    def _message(self, number: int, body: bytes) -> wire.CallActor:
        if self._name in getattr(cast("Any", self._mesh)._cls_or_pickle, "__values__", ()):
            self._node.value_calls &= self._node.calls.keys()
            self._node.value_calls.add(number)
        return wire.CallActor(self._node.id, self._mesh._actor, self._name, number, calling_origin(), body)

    def _to_all(self, body: bytes, call: ManyCall | StreamCall | None) -> None:
        target, deaths = self._mesh._target(), self._node.deaths
        living = tuple(ref for ref in target.procs if ref.id not in deaths)
        if living:
            cast("MessageSystem", self._mesh._system).send(living, self._message(call._number if call else 0, body))
        if call is not None and len(living) < len(target.procs):
            with self._node.lock:
                for rank, ref in enumerate(target.procs):
                    if ref.id in deaths:
                        call.on_gone(rank, deaths[ref.id])

    def _to_one(self, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        body, target = self._packed(args, kwargs), self._mesh._target()
        call = OneCall(cast("Any", self._node), self._label, target, rank)
        ref = target.procs[rank]
        death = self._node.deaths.get(ref.id)
        if death is not None:
            call.on_reply(rank, DEAD, death, ())
        else:
            cast("MessageSystem", self._mesh._system).send((ref,), self._message(call._number, body))
        return call


class HostedActorMesh(ActorMesh[T]):
    """A mesh of a tool's actors."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if type(found) is Endpoint:
            found = self.__dict__[name] = HostedEndpoint(self, name, cast("Any", found)._spec)
        return found

    def _stop(self, reason: str) -> Future[Any]:
        system = cast("MessageSystem", self._system)
        target = self._target()
        call = ManyCall(self._system.node, f"{self._name}.stop", target)
        living = tuple(ref for ref in target.procs if ref.id not in system.node.deaths)
        system.send(living, wire.StopToolActor(system.node.id, self._actor, call._number))
        for rank, ref in enumerate(target.procs):
            if ref.id in system.node.deaths:
                call.on_gone(rank, system.node.deaths[ref.id])
        return settled(call)

    def __reduce__(self) -> Any:
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
    system = cast("Any", message_system())
    return HostedActorMesh(system, actor, name, mesh_name, loads(cls), procs, region, None, spawned)


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
        controller = getattr(self._system, "controller", None)
        if controller is None:
            raise NotOffered(f"mesh {self.name}: only its controller can start and end its processes")
        return controller

    def _not_offered(self, what: str) -> NoReturn:
        raise NotOffered(f"mesh {self.name} {self._tools.MESHES.format(self._tools.engine_name)} {what}")

    def spawn(self, name: str, cls: type[T], *args: Any, **kwargs: Any) -> ActorMesh[T]:
        """Create one actor of a tool in every proc. User code spawns actors with the other runtime's own meshes.

        Dead procs do not block calls to live ones: calls to actors on dead procs fail, as on procs that die later.
        """
        system = cast("MessageSystem", self._system)
        if self._stopped:
            raise RuntimeError(f"proc mesh {self.name} was stopped: spawn on a new one")
        target = self._target()
        actor = f"{name}-{os.urandom(4).hex()}"
        mesh: HostedActorMesh[T] = HostedActorMesh(
            self._system, actor, name, self.name, cls, target.procs, Region.from_extent(target.extent)
        )
        if mesh._spec.is_async or not mesh._spec.tool:
            self._not_offered(f"run {cls.__name__}: the tools' way into its ranks takes sync actors of tools only")
        try:
            body = dumps_flat((cls, args, kwargs))
        except Exception as error:
            explain(error, f"{cls.__name__} or an argument of its constructor")
            raise
        call = ManyCall(self._system.node, f"{name}.__init__", target, True)
        living = tuple(ref for ref in target.procs if ref.id not in system.node.deaths)
        system.send(living, wire.SpawnActor(system.node.id, self._mesh_uid, actor, name, call._number, body))
        for rank, ref in enumerate(target.procs):
            if ref not in living:
                call.on_reply(rank, OK, dumps_flat(None), ())
        mesh._ready = call.then(lambda _values: None)
        return mesh

    # -- life --------------------------------------------------------------------------------------

    def _stop(self, reason: str) -> Future[Any]:
        return self._tools.stop_procs(self, reason)

    def kill(self, reason: str = "") -> Future[None]:
        """Kill these procs with SIGKILL."""
        return self._tools.kill_procs(self, reason)

    def heal(self, hosts: Any = None, timeout: float = 0.0) -> NoReturn:
        """Raise `NotOffered`: the other runtime does not replace procs."""
        self._not_offered("replace dead ranks")

    def _ask_agents(self, message: Any, what: str) -> NoReturn:
        self._not_offered(what)

    def _ask_procs(self, message: Any, what: str) -> NoReturn:
        self._not_offered(what)

    def interrupt(self, cells: str = "") -> Future[ValueMesh[list[str]]]:
        """See ``ProcMesh.interrupt``."""
        system = cast("MessageSystem", self._system)
        target = self._target()
        call = ManyCall(self._system.node, f"{self.name}.interrupt", target)
        living = tuple(ref for ref in target.procs if ref.id not in system.node.deaths)
        system.send(living, wire.InterruptRank(system.node.id, call._number, cells))
        for rank, ref in enumerate(target.procs):
            if ref.id in system.node.deaths:
                call.on_gone(rank, system.node.deaths[ref.id])
        return call

    def status(self) -> Future[ValueMesh[ProcStatus]]:
        """Return state, pid, memory and CPU use of every proc; for procs on other hosts, only state and pid."""
        target = self._target()
        return done(cast("Any", self._system), ValueMesh(target.extent, [self._status(ref) for ref in target.procs]))

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

    def __reduce__(self) -> Any:
        return _rebuild_procs, (self._mesh_uid, self.name, self._procs, self._shape, self._host_region)


def _rebuild_procs(uid: str, name: str, procs: tuple[ProcRef, ...], region: Region, hosts: Region) -> ProcMesh:
    system = message_system()
    known = system.proc_meshes.get(uid)
    if known is not None and known._region == region:
        return known
    return HostedProcMesh(cast("Any", system), uid, name, procs, region, hosts)


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

    def with_python_executable(self, python: Any) -> NoReturn:
        """Raise `NotOffered`."""
        raise NotOffered(f"{self._controller.engine_name} starts ranks with the interpreter of the kernel only")

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Any = None,
        name: str | None = None,
        proc_bind: Any = None,
        bootstrap_command: Any = None,
        *,
        env: Mapping[str, str | None] | None = None,
        preload: Sequence[str] = (),
        restart: Any = "never",
        spares: Any = None,
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
