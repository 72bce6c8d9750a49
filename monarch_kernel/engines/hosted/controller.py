"""The tools of a controller on another runtime: the meshes that it has entered, their output, and their deaths."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from monarch_kernel.actor import ActorMesh, Extent, Future, HostMesh, Point, ProcMesh, ValueMesh
from monarch_kernel.engines.hosted import wire
from monarch_kernel.engines.hosted.meshes import HOST, HostedActorMesh, HostedHostMesh, HostedProcMesh, done
from monarch_kernel.engines.hosted.tool_actor import ToolActor
from monarch_kernel.engines.hosted.tool_process import ToolProcess
from monarch_kernel.introspection import StackRead, Whole
from monarch_kernel.introspection import whole_of as whole_of_handle
from monarch_kernel.meshes import KeptError, KeptHost, KeptInfo
from monarch_kernel.output import RankOutput
from monarch_kernel.protocol.output_records import OutputDecoder, decode_answer, plain_text
from monarch_kernel.protocol.refs import Death, DeathKind, ProcRef
from monarch_kernel.runtime.mesh.shape import Region
from monarch_kernel.subscriptions import Subscribers, Subscription

#: The time without a message after which a rank releases what this controller has stopped (seconds).
SILENCE = 2.0
#: The interval of heartbeats to ranks that expect them (seconds).
BEAT = 0.5
#: How much output of each rank is kept for ``%mesh logs`` (bytes).
KEPT_OUTPUT = 1 << 20
#: The time for the ranks of a mesh to let the tools in (seconds).
ENTER = 60.0
#: The time for a mesh to end, and for one that has lost ranks, for which Monarch may wait (seconds).
STOP, STOP_REST = 15.0, 2.0


class Carrier(Protocol):
    """An engine's connection to the ranks of one mesh."""

    def send(self, ranks: Sequence[int], data: bytes) -> None:
        """Send bytes to the attached processes of these ranks, in order, without waiting."""
        ...

    def stop(self, reason: str, patience: float) -> None:
        """End the mesh, and wait at most ``patience`` seconds for that. Never raises."""
        ...


class HostedMesh:
    """A mesh that this controller's tools have entered.

    Args:
        procs: the handle of the mesh.
        carrier: the connection to its ranks.
        owned: whether its processes belong to this controller rather than to another job.
    """

    def __init__(self, procs: HostedProcMesh, carrier: Carrier, owned: bool) -> None:
        self.procs = procs
        self.carrier = carrier
        self.owned = owned
        self.entered = threading.Event()
        self.pidfds: dict[int, int] = {}
        self.decoders: dict[tuple[int, int], OutputDecoder] = {}
        self.kept: dict[int, list[tuple[int, bytes]]] = {}
        self.waiting: set[tuple[str, int]] = set()  # calls from its ranks that this controller has not answered
        self.spawned: dict[str, wire.SpawnActor] = {}  # its actors, for ranks that enter later


class ToolController(ToolProcess):
    """The tools of a controller, and its engine (``interface.ToolRuntime``).

    Args:
        name: the name of the other runtime for users.
    """

    #: A clause for errors about its meshes, up to "cannot". The braces are the name of the engine.
    MESHES = "runs on {}, which cannot"

    def __init__(self, name: str) -> None:
        proc = f"controller-{os.urandom(6).hex()}"
        super().__init__(name, ProcRef(proc, "", HOST, proc, ""))
        system: Any = self.system
        system.controller = self
        self.engine_name = name
        self._meshes: dict[str, HostedMesh] = {}
        self._changes: Subscribers[[]] = Subscribers("a callback of on_change")
        self._output: Subscribers[[RankOutput]] = Subscribers("an output subscriber")
        self._beating: threading.Thread | None = None
        self._beat = threading.Event()
        self._closed = False

    # -- meshes --------------------------------------------------------------------------------------

    def enter(
        self, name: str, extent: Extent, make: Callable[[bytes], Carrier], *, owned: bool, timeout: float = ENTER
    ) -> HostedProcMesh:
        """Let the tools enter the ranks of a mesh of the other runtime.

        Args:
            name: the mesh's name for users.
            make: starts an attached process in each rank with this first message, and returns the connection to the
                ranks.
            owned: whether the mesh belongs to this controller.

        Raises:
            TimeoutError: not all ranks have answered in time; the message names them.
        """
        uid = f"{name}-{os.urandom(4).hex()}"
        host_region = region = Region.from_extent(extent)
        refs = tuple(ProcRef(f"{uid}.{rank}", "", "", uid, "") for rank in range(extent.nelements))
        system: Any = self.system
        procs = HostedProcMesh(system, uid, name, refs, region, host_region, "", done(self.system, True))
        first = wire.EnterRank(self.node.id, uid, name, extent.names, extent.shape, SILENCE, owned)
        mesh = HostedMesh(procs, _NoCarrier(), owned)
        self._meshes[uid] = mesh
        self.system.proc_meshes[uid] = procs
        try:
            mesh.carrier = make(wire.encode(first))
            if not mesh.entered.wait(timeout):
                missing = [rank for rank, ref in enumerate(refs) if ref.id not in self.node.pids]
                raise TimeoutError(
                    f"mesh {name}: ranks {missing} did not let the tools in within {timeout:g} s; are they busy in "
                    "native code, or do they lack monarch_kernel?"
                )
        except BaseException:
            self._forget(mesh)
            raise
        self._changes.notify()
        return mesh.procs

    def _forget(self, mesh: HostedMesh) -> None:
        uid = mesh.procs._mesh_uid
        mesh.procs._stopped = True
        self._meshes.pop(uid, None)
        self.system.proc_meshes.pop(uid, None)
        for pidfd in mesh.pidfds.values():
            self.node.poller.unregister(pidfd)
            os.close(pidfd)
        mesh.pidfds.clear()
        stopped = Death.of(DeathKind.STOPPED, "the mesh was stopped")
        for ref in mesh.procs._procs:
            self.node.on_death(ref.id, stopped)
        self._changes.notify()

    def start_procs(
        self, name: str, per_host: dict[str, int], env: dict[str, str | None], preload: tuple[str, ...]
    ) -> ProcMesh:
        """Start a mesh on this host. Engines override this."""
        raise NotImplementedError

    def stop_procs(self, procs: HostedProcMesh, reason: str) -> Future[Any]:
        """End a mesh. On another job's mesh, only the tools end."""
        mesh = self._meshes.get(procs._mesh_uid)
        if mesh is not None:
            self._end(mesh, reason, STOP)
        return done(self.system, None, f"{procs.name}.stop")

    def _end(self, mesh: HostedMesh, reason: str, patience: float) -> None:
        """Leave a mesh. A mesh of this controller is ended, and processes that do not end in time are killed."""
        living = [self.node.pids.get(mesh.procs._procs[rank].id, 0) for rank in self._living(mesh)]
        whole = len(living) == len(mesh.procs._procs)
        near = [pid for pid, ref in zip(living, mesh.procs._procs, strict=False) if pid and ref.host == HOST]
        self._leave(mesh)
        self._forget(mesh)
        if mesh.owned:
            mesh.carrier.stop(reason, patience if whole else min(patience, STOP_REST))
            for pid in near:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _leave(self, mesh: HostedMesh) -> None:
        living = self._living(mesh)
        if living:
            mesh.carrier.send(living, wire.encode(wire.LeaveRank(self.node.id)))

    def kill_procs(self, procs: HostedProcMesh, reason: str) -> Future[Any]:
        """Kill procs of this host."""
        pids = [(ref, self.node.pids.get(ref.id, 0)) for ref in procs._target().procs]
        far = [ref.host for ref, pid in pids if ref.host != HOST and pid]
        if far:
            raise self.not_offered(f"kill processes on other hosts ({far[0]})")
        for ref, pid in pids:
            if pid and ref.id not in self.node.deaths:
                os.kill(pid, signal.SIGKILL)
                self.on_death(ref.id, reason or "it was killed")
        return done(self.system, None, f"{procs.name}.kill")

    def _living(self, mesh: HostedMesh) -> list[int]:
        return [rank for rank, ref in enumerate(mesh.procs._procs) if ref.id not in self.node.deaths]

    def on_death(self, proc: str, cause: str) -> None:
        """Record that a rank is dead."""
        ref = self.ref_of(proc)
        death = Death.of(DeathKind.EXITED, cause, proc, ref.host, self.node.pids.get(proc, 0))
        if self.node.on_death(proc, death):
            self._changes.notify()

    # -- messages ------------------------------------------------------------------------------------

    def send(self, procs: tuple[ProcRef, ...], message: Any) -> None:
        """See ``ToolProcess.send``."""
        data = wire.encode(message)
        ranks: dict[str, list[int]] = {}
        for ref in procs:
            if ref.id == self.node.id:
                self.handle(message)
            else:
                uid, _, rank = ref.id.rpartition(".")
                ranks.setdefault(uid, []).append(int(rank))
        for uid, chosen in ranks.items():
            mesh = self._meshes.get(uid)
            if mesh is not None:
                mesh.carrier.send(sorted(chosen), data)
                match message:
                    case wire.CallAnswer():
                        mesh.waiting.discard((f"{uid}.{chosen[0]}", message.call))
                    case wire.SpawnActor():
                        mesh.spawned[message.actor] = message
                    case wire.StopToolActor():
                        mesh.spawned.pop(message.actor, None)
                    case _:
                        pass

    def handle(self, message: Any) -> None:
        """See ``ToolProcess.handle``."""
        match message:
            case wire.ToolOutput():
                self._on_output(message)
            case wire.RankEntered():
                self._on_entered(message)
            case wire.CallActor() if message.call and message.sender != self.node.id:
                mesh = self._meshes.get(message.sender.rpartition(".")[0])
                if mesh is not None:
                    mesh.waiting.add((message.sender, message.call))
                    self._start_beating()
                super().handle(message)
            case _:
                super().handle(message)

    def make_actor(self, message: wire.SpawnActor) -> ToolActor:
        """See ``ToolProcess.make_actor``."""
        return ToolActor(message.actor, message.name, Point(0, Extent((), ())))

    def ref_of(self, proc: str) -> ProcRef:
        """See ``ToolProcess.ref_of``."""
        uid, _, rank = proc.rpartition(".")
        mesh = self._meshes.get(uid)
        return mesh.procs._procs[int(rank)] if mesh is not None else super().ref_of(proc)

    def _on_entered(self, message: wire.RankEntered) -> None:
        mesh = self._meshes.get(message.uid)
        if mesh is None:
            return
        proc = f"{message.uid}.{message.rank}"
        self.node.pids[proc] = message.pid
        refs = list(mesh.procs._procs)
        agent = f"{message.uid}@{message.host}"
        refs[message.rank] = ProcRef(proc, "", message.host, agent, "")
        mesh.procs._procs = tuple(refs)
        mesh.procs._cached = None
        if message.host == HOST:
            self._watch(mesh, message.rank, message.pid)
        self._check_entered(mesh)

    def enters_never(self, mesh: HostedMesh, rank: int) -> None:
        """Handle that a rank has refused the tools, or ended before they entered: `enter` no longer waits for it."""
        self.node.pids.setdefault(f"{mesh.procs._mesh_uid}.{rank}", 0)
        self._check_entered(mesh)

    def _check_entered(self, mesh: HostedMesh) -> None:
        if all(ref.id in self.node.pids for ref in mesh.procs._procs):
            mesh.entered.set()

    def _watch(self, mesh: HostedMesh, rank: int, pid: int) -> None:
        """Detect at once when a process of this host ends. The other runtime takes seconds for that."""
        proc = f"{mesh.procs._mesh_uid}.{rank}"
        try:
            pidfd = mesh.pidfds[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self.on_death(proc, "it has exited")
            return

        def ended(_events: int) -> None:
            self.node.poller.unregister(pidfd)
            if mesh.pidfds.pop(rank, None) is not None:
                os.close(pidfd)
            self.on_death(proc, f"process {pid} has ended")

        self.node.poller.register(pidfd, ended)
        self.node.poller.start_background()

    # -- heartbeats ----------------------------------------------------------------------------------

    def _start_beating(self) -> None:
        self._beat.set()
        if self._beating is None:
            self._beating = threading.Thread(target=self._send_beats, name="monarch-tool-heartbeat", daemon=True)
            self._beating.start()

    def _is_waited_for(self, mesh: HostedMesh) -> bool:
        """Return whether the ranks of a mesh expect heartbeats. Without them, ranks release their stops."""
        return bool(mesh.waiting)

    def _send_beats(self) -> None:
        data = wire.encode(wire.ControllerBeat(self.node.id))
        while not self._closed:
            self._beat.wait()
            self._beat.clear()
            for mesh in list(self._meshes.values()):
                living = self._living(mesh)
                if living and self._is_waited_for(mesh):
                    self._beat.set()
                    mesh.carrier.send(living, data)
            if self._beat.is_set():
                threading.Event().wait(BEAT)

    # -- output --------------------------------------------------------------------------------------

    def _on_output(self, message: wire.ToolOutput) -> None:
        mesh = self._meshes.get(message.uid)
        if mesh is None:
            return
        rank = message.rank
        key = rank, message.stream
        decoder = mesh.decoders.get(key)
        if decoder is None:
            decoder = mesh.decoders[key] = OutputDecoder("stdout" if message.stream == 1 else "stderr")
        kept = mesh.kept.setdefault(rank, [])
        kept.append((message.stream, message.data))
        while sum(len(data) for _, data in kept) > KEPT_OUTPUT:
            kept.pop(0)
        ref = mesh.procs._procs[rank]
        coords = dict(mesh.procs.extent.point(rank))
        pid = self.node.pids.get(ref.id, 0)
        for event in decoder.feed(message.data):
            if event.kind == "flush" and decode_answer(event.data)[0]:
                continue
            self._output.notify(
                RankOutput(
                    mesh.procs.name,
                    ref.id,
                    rank,
                    coords,
                    ref.host,
                    pid,
                    event.stream,
                    event.cell,
                    event.kind,
                    event.data,
                )
            )

    def subscribe(self, callback: Callable[[RankOutput], None]) -> Subscription:
        """See ``ToolRuntime``."""
        return self._output.subscribe(callback)

    def logs(self, mesh: ProcMesh, ranks: Any = None, tail: int | None = None) -> ValueMesh[str]:
        """See ``ToolRuntime``."""
        found = self._meshes.get(mesh._mesh_uid)
        chosen = list(range(len(mesh))) if ranks is None else list(ranks)
        whole = list(mesh._region.ranks())
        texts: list[str] = [""] * len(mesh)
        for rank in chosen:
            text = plain_text(found.kept.get(whole[rank], ())) if found is not None else ""
            texts[rank] = text if tail is None else "".join(text.splitlines(keepends=True)[-tail:])
        return ValueMesh(mesh.extent, texts)

    # -- what tools ask about meshes -------------------------------------------------------------------

    def this_host(self) -> HostMesh:
        """See ``ToolRuntime``."""
        return HostedHostMesh(self)

    def list_proc_meshes(self) -> list[ProcMesh]:
        """See ``ToolRuntime``."""
        return [mesh.procs for mesh in list(self._meshes.values()) if mesh.entered.is_set()]

    def get_mesh(self, name: str) -> ProcMesh:
        """See ``ToolRuntime``."""
        meshes = self.list_proc_meshes()
        for mesh in reversed(meshes):
            if mesh.name == name:
                return mesh
        known = ", ".join(mesh.name for mesh in meshes) or "none"
        raise LookupError(f"there is no proc mesh {name!r}; there are {known}")

    def on_change(self, callback: Callable[[], None]) -> Subscription:
        """See ``ToolRuntime``."""
        return self._changes.subscribe(callback)

    def whole_of(self, mesh: Any) -> Whole:
        """See ``ToolRuntime``."""
        return whole_of_handle(mesh)

    def hosts_of(self, procs: Any) -> list[str]:
        """See ``ToolRuntime``."""
        return [ref.host for ref in procs._target().procs]

    def deaths_of(self, procs: Any) -> dict[int, Death]:
        """See ``ToolRuntime``."""
        known = self.node.deaths
        return {rank: known[ref.id] for rank, ref in enumerate(procs._target().procs) if ref.id in known}

    def stacks_from_outside(
        self, mesh: Any, ranks: Iterable[int], *, native: bool = False, timeout: float = 2.0
    ) -> dict[int, StackRead]:
        """See ``ToolRuntime``: the other runtime's hosts do not read stacks."""
        why = f"the engine {self.NAME} reads no stacks from outside"
        refs = mesh._target().procs
        return {
            rank: StackRead(refs[rank].id, self.node.pids.get(refs[rank].id, 0), refs[rank].host, "", "", why)
            for rank in ranks
        }

    def controller_actor(self, name: str, cls: type[Any], timeout: float, mesh: Any = None) -> ActorMesh[Any]:
        """See ``ToolRuntime``."""
        system: Any = self.system
        if name not in self.actors:
            from monarch_kernel.protocol.serialize import dumps_flat

            self.handle(wire.SpawnActor(self.node.id, "", name, name, 0, dumps_flat((cls, (), {}))))
        return HostedActorMesh(system, name, name, "", cls, (self.node.ref,), Region.from_extent(Extent((), ())))

    def is_joined(self, mesh: Any) -> bool:
        """See ``ToolRuntime``."""
        return False

    def driver_of(self, mesh: Any, ask: bool = True) -> str:
        """See ``ToolRuntime``: its controller has control of a mesh."""
        return ""

    def joined_jobs(self) -> NoReturn:
        """Raise `NotOffered`: only kernels on this package's own engine can join jobs."""
        raise self.not_offered("join jobs that others have started; a kernel without MONARCH_KERNEL_ENGINE can")

    def home(self) -> ProcMesh | None:
        """See ``ToolRuntime``. Returns None: a controller is in no mesh."""
        return None

    # -- kept meshes -----------------------------------------------------------------------------------

    def keep(self, name: str, idle: float = 0.0) -> KeptHost:
        """See ``ToolRuntime``."""
        raise KeptError(f"the engine {self.NAME} keeps no meshes: they end with their controller")

    def kept(self) -> list[KeptInfo]:
        """See ``ToolRuntime``."""
        return []

    def held(self) -> list[KeptHost]:
        """See ``ToolRuntime``."""
        return []

    def kept_host_of(self, mesh: ProcMesh) -> KeptHost | None:
        """See ``ToolRuntime``."""
        return None

    def taken_over(self) -> dict[str, str]:
        """See ``ToolRuntime``."""
        return {}

    def attach(self, name: str, force: bool = False) -> KeptHost:
        """See ``ToolRuntime``. Engines that can reach other processes' meshes override this."""
        raise KeptError(f"the engine {self.NAME} cannot reach meshes of other processes")

    def end_kept(self, name: str, force: bool = False) -> KeptInfo:
        """See ``ToolRuntime``."""
        raise KeptError(f"the engine {self.NAME} keeps no meshes: there is no {name!r}")

    # -- the end ---------------------------------------------------------------------------------------

    def shut_down(self, timeout: float) -> None:
        """See ``ToolRuntime``."""
        for mesh in list(self._meshes.values()):
            self._end(mesh, "the controller ends", timeout / 2)
        self.close()

    def close(self) -> None:
        """Leave all meshes at the end of this process."""
        self._closed = True
        for mesh in list(self._meshes.values()):
            self._leave(mesh)
            self._forget(mesh)
        for actor in list(self.actors.values()):
            actor.stop(lambda: None)
        self._beat.set()


class _NoCarrier:
    """Placeholder until the mesh has a carrier."""

    def send(self, ranks: Sequence[int], data: bytes) -> None:
        """Drop the data."""

    def stop(self, reason: str, patience: float) -> None:
        """Do nothing."""
