"""The meshes of another runtime that this controller's tools have entered: their messages, output and deaths.

Each rank is a proc of this process's own node, with a link that the other runtime carries.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import msgspec

from monarch_kernel.actor import ActorMesh, Extent, Future, ProcMesh, ValueMesh
from monarch_kernel.engines.hosted import wire
from monarch_kernel.engines.hosted.meshes import HOST, HostedActorMesh, HostedProcMesh, done, set_system
from monarch_kernel.engines.interface import NotOffered
from monarch_kernel.introspection import StackRead
from monarch_kernel.protocol.messages import Call, Create, OutputChunk, Reply
from monarch_kernel.protocol.output_records import plain_text
from monarch_kernel.protocol.refs import Death, DeathKind, ProcRef
from monarch_kernel.protocol.serialize import Body, loads
from monarch_kernel.runtime.actor.output import has_subscribers
from monarch_kernel.runtime.actor.system import ActorSystem, get_actor_system
from monarch_kernel.runtime.mesh.shape import SINGLE, Region

log = logging.getLogger(__name__)

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
        owned: whether its processes belong to this controller rather than to another job.
    """

    carrier: Carrier

    def __init__(self, procs: HostedProcMesh, owned: bool) -> None:
        self.procs = procs
        self.uid = procs._mesh_uid
        self.owned = owned
        self.entered = threading.Event()
        self.pidfds: dict[int, int] = {}
        self.kept: dict[int, list[tuple[int, bytes]]] = {}
        self.waiting: set[tuple[int, int]] = set()  # (rank, number) of calls that this controller has not answered
        self.spawned: dict[str, tuple[Create, bytes]] = {}  # its actors, for ranks that enter later


class HostedLink:
    """The link to the attached process of one rank (``runtime.node.interfaces.PeerLink``)."""

    pid = 0
    local = False
    attached = True
    ended = ""
    queued = 0

    def __init__(self, mesh: HostedMesh, rank: int) -> None:
        self.peer = f"{mesh.uid}.{rank}"
        self.closed = False
        self._mesh = mesh
        self._rank = rank

    def send(self, header: bytes, body: Body = b"") -> None:
        """See ``PeerLink``. Messages of the runtime itself have no receiver there."""
        try:
            message = wire.decode(header)
        except msgspec.ValidationError:
            return
        if isinstance(message, Reply):
            self._mesh.waiting.discard((self._rank, message.call))
        if not self.closed:
            self._mesh.carrier.send([self._rank], wire.pack(header, body))

    def drain(self) -> None:
        """Do nothing: no messages are queued here."""

    def close(self) -> None:
        """See ``PeerLink``. The connection belongs to the carrier."""
        self.closed = True

    abandon = close


class ToolController:
    """The meshes of another runtime that this controller's tools have entered.

    Args:
        name: the name of the other runtime for users.
    """

    #: A clause for errors about its meshes, up to "cannot". The braces are the name of the engine.
    MESHES = "runs on {}, which cannot"

    def __init__(self, name: str) -> None:
        self.engine_name = name
        self._meshes: dict[str, HostedMesh] = {}
        self._open_actors: set[str] = set()  # the actors of this process that ranks may call
        self._beating: threading.Thread | None = None
        self._beat = threading.Event()
        self._closed = False

    @property
    def system(self) -> ActorSystem:
        """The actor system of this process; the first use starts it."""
        return get_actor_system()

    # -- meshes --------------------------------------------------------------------------------------

    def enter(
        self,
        name: str,
        extent: Extent,
        make: Callable[[wire.EnterRank], Carrier],
        *,
        owned: bool,
        timeout: float = ENTER,
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
        system, node = self.system, self.system.node
        uid = f"{name}-{os.urandom(4).hex()}"
        region = Region.from_extent(extent)
        refs = tuple(self._ref(uid, rank, "") for rank in range(extent.nelements))
        procs = HostedProcMesh(system, uid, name, refs, region, region, "", done(system, True))
        procs._shared.update(tools=self, tool=True)  # it is in this runtime's own list of meshes
        first = wire.EnterRank(node.id, uid, name, extent.names, extent.shape, SILENCE, owned)
        mesh = self._meshes[uid] = HostedMesh(procs, owned)
        set_system(system)
        system.proc_meshes[uid] = procs
        node.carried.update(ref.id for ref in refs)
        for rank, ref in enumerate(refs):
            node.refs[ref.id] = ref
            node.links[ref.id] = HostedLink(mesh, rank)
        try:
            mesh.carrier = make(first)
            if not mesh.entered.wait(timeout):
                missing = [rank for rank, ref in enumerate(refs) if ref.id not in node.pids]
                raise TimeoutError(
                    f"mesh {name}: ranks {missing} did not let the tools in within {timeout:g} s; are they busy in "
                    "native code, or do they lack monarch_kernel?"
                )
        except BaseException:
            self._forget(mesh)
            raise
        system.changed()
        return procs

    def _ref(self, uid: str, rank: int, host: str) -> ProcRef:
        """Return the reference of a rank, which is reached over its own link like a proc of this site."""
        return ProcRef(f"{uid}.{rank}", "", host, f"{uid}@{host}" if host else uid, "", self.system.node.ref.site)

    def _forget(self, mesh: HostedMesh) -> None:
        node = self.system.node
        mesh.procs._stopped = True
        self._meshes.pop(mesh.uid, None)
        self.system.proc_meshes.pop(mesh.uid, None)
        for pidfd in mesh.pidfds.values():
            node.poller.unregister(pidfd)
            os.close(pidfd)
        mesh.pidfds.clear()
        stopped = Death.of(DeathKind.STOPPED, "the mesh was stopped")
        for ref in mesh.procs._procs:
            node.declare_dead(ref.id, stopped)
            node.carried.discard(ref.id)
        self.system.changed()

    def start_procs(
        self, name: str, per_host: dict[str, int], env: dict[str, str | None], preload: tuple[str, ...]
    ) -> ProcMesh:
        """Start a mesh on this host. Engines override this."""
        raise NotImplementedError

    def stop_procs(self, procs: HostedProcMesh, reason: str) -> Future[object]:
        """End a mesh. On another job's mesh, only the tools end."""
        mesh = self._meshes.get(procs._mesh_uid)
        if mesh is not None:
            self._end(mesh, reason, STOP)
        return done(self.system, None, f"{procs.name}.stop")

    def _end(self, mesh: HostedMesh, reason: str, patience: float) -> None:
        """Leave a mesh. A mesh of this controller is ended, and processes that do not end in time are killed."""
        pids = self.system.node.pids
        living = [pids.get(mesh.procs._procs[rank].id, 0) for rank in self._living(mesh)]
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
            mesh.carrier.send(living, wire.pack(wire.LeaveRank()))

    def kill_procs(self, procs: HostedProcMesh, reason: str) -> Future[Any]:
        """Kill procs of this host."""
        node = self.system.node
        pids = [(ref, node.pids.get(ref.id, 0)) for ref in procs._target().procs]
        far = [ref.host for ref, pid in pids if ref.host != HOST and pid]
        if far:
            raise NotOffered(f"the engine {self.engine_name} cannot kill processes on other hosts ({far[0]})")
        for ref, pid in pids:
            if pid and ref.id not in node.deaths:
                os.kill(pid, signal.SIGKILL)
                self.on_death(ref.id, reason or "it was killed")
        return done(self.system, None, f"{procs.name}.kill")

    def _living(self, mesh: HostedMesh) -> list[int]:
        deaths = self.system.node.deaths
        return [rank for rank, ref in enumerate(mesh.procs._procs) if ref.id not in deaths]

    def on_death(self, proc: str, cause: str) -> None:
        """Record that a rank is dead."""
        node = self.system.node
        host = node.refs[proc].host
        node.declare_dead(proc, Death.of(DeathKind.EXITED, cause, proc, host, node.pids.get(proc, 0)))

    def spawned(self, procs: HostedProcMesh, create: Create, body: bytes) -> None:
        """Remember an actor, for ranks that enter later."""
        self._meshes[procs._mesh_uid].spawned[create.actor] = msgspec.structs.replace(create, call=0), body

    def stopped(self, procs: HostedProcMesh, actor: str) -> None:
        """Forget an actor that was stopped."""
        if procs._mesh_uid in self._meshes:
            self._meshes[procs._mesh_uid].spawned.pop(actor, None)

    # -- messages ------------------------------------------------------------------------------------

    def soon(self, handler: Callable[[], None]) -> None:
        """Call back on the polling thread, in the order of these calls. Thread-safe."""
        self.system.node.poller.call_later(0.0, handler)

    def receive(self, uid: str, rank: int, data: bytes) -> None:
        """Handle bytes from a rank of a mesh. Thread-safe; those of a rank arrive in order."""
        self.soon(partial(self._receive, uid, rank, data))

    def _receive(self, uid: str, rank: int, data: bytes) -> None:
        mesh = self._meshes.get(uid)
        if mesh is not None:
            try:
                self.handle(mesh, rank, *wire.unpack(data))
            except Exception:
                log.exception("a message of rank %d of %s could not be handled", rank, mesh.procs.name)

    def handle(self, mesh: HostedMesh, rank: int, message: wire.ToolMessage, body: Body) -> None:
        """Handle a message of a rank, on the polling thread."""
        match message:
            case OutputChunk():
                self._on_output(mesh, rank, message.stream, bytes(body))
            case wire.RankEntered():
                self.on_entered(mesh, rank, message.host, message.pid)
            case Create():  # of an actor here that a rank needs before this controller
                self._open_actor(message.actor, loads(body, message.buffers)[0])
            case Reply() | Call():
                self._dispatch(mesh, rank, message, body)
            case _:
                pass  # from a later version

    def _dispatch(self, mesh: HostedMesh, rank: int, message: Reply | Call, body: Body) -> None:
        """Pass a message to the node of this process."""
        node = self.system.node
        link = node.links.get(f"{mesh.uid}.{rank}")
        if link is None:  # a late message of a dead rank
            return
        if isinstance(message, Call) and message.call:
            mesh.waiting.add((rank, message.call))
            self._start_beating()
        node._dispatch(link, message, body)

    def on_entered(self, mesh: HostedMesh, rank: int, host: str, pid: int) -> None:
        """Handle that a rank has let the tools in."""
        node = self.system.node
        refs = list(mesh.procs._procs)
        ref = refs[rank] = self._ref(mesh.uid, rank, host)
        node.refs[ref.id] = ref
        mesh.procs._procs = tuple(refs)
        mesh.procs._cached = None
        node.pids[ref.id] = pid
        if host == HOST:
            self._watch(mesh, rank, pid)
        self._check_entered(mesh)

    def enters_never(self, mesh: HostedMesh, rank: int) -> None:
        """Handle that a rank has refused the tools, or ended before they entered: `enter` no longer waits for it."""
        self.system.node.pids.setdefault(f"{mesh.uid}.{rank}", 0)
        self._check_entered(mesh)

    def _check_entered(self, mesh: HostedMesh) -> None:
        if all(ref.id in self.system.node.pids for ref in mesh.procs._procs):
            mesh.entered.set()

    def _watch(self, mesh: HostedMesh, rank: int, pid: int) -> None:
        """Detect at once when a process of this host ends. The other runtime takes seconds for that."""
        proc, poller = f"{mesh.uid}.{rank}", self.system.node.poller
        try:
            pidfd = mesh.pidfds[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self.on_death(proc, "it has exited")
            return

        def ended(_events: int) -> None:
            poller.unregister(pidfd)
            if mesh.pidfds.pop(rank, None) is not None:
                os.close(pidfd)
            self.on_death(proc, f"process {pid} has ended")

        poller.register(pidfd, ended)

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
        data = wire.pack(wire.ControllerBeat())
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

    def _on_output(self, mesh: HostedMesh, rank: int, stream: int, data: bytes) -> None:
        kept = mesh.kept.setdefault(rank, [])
        kept.append((stream, data))
        while sum(len(each) for _, each in kept) > KEPT_OUTPUT:
            kept.pop(0)
        if has_subscribers():  # the terminal of a script shows the output of its own ranks only
            for sink in self.system.output_sinks:
                sink(f"{mesh.uid}.{rank}", stream, data)

    def logs(self, mesh: ProcMesh, *, ranks: Sequence[int] | None = None, tail: int | None = None) -> ValueMesh[str]:
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

    def list_proc_meshes(self) -> list[ProcMesh]:
        """See ``ToolRuntime``."""
        return [mesh.procs for mesh in list(self._meshes.values()) if mesh.entered.is_set()]

    def stacks_from_outside(
        self, mesh: Any, ranks: Iterable[int], *, native: bool = False, timeout: float = 2.0
    ) -> dict[int, StackRead]:
        """See ``ToolRuntime``: the other runtime's hosts do not read stacks."""
        why = f"the engine {self.engine_name} reads no stacks from outside"
        refs, pids = mesh._target().procs, self.system.node.pids
        return {
            rank: StackRead(refs[rank].id, pids.get(refs[rank].id, 0), refs[rank].host, "", "", why) for rank in ranks
        }

    def controller_actor(self, name: str, cls: type[object], timeout: float, mesh: object = None) -> ActorMesh[object]:
        """See ``ToolRuntime``."""
        self._open_actor(name, cls)
        system = self.system
        return HostedActorMesh(system, name, name, "", cls, (system.node.ref,), SINGLE.region)

    def _open_actor(self, name: str, cls: type[object]) -> None:
        """Start an actor here that ranks may call, unless it exists."""
        self._open_actors.add(name)
        self.system.start_local_actor(name, name, cls)

    # -- the end ---------------------------------------------------------------------------------------

    def end_all(self, timeout: float) -> None:
        """End all meshes; leave those of other jobs."""
        for mesh in list(self._meshes.values()):
            self._end(mesh, "the controller ends", timeout / 2)
        self.close()

    def close(self) -> None:
        """Leave all meshes at the end of this process."""
        self._closed = True
        for mesh in list(self._meshes.values()):
            self._leave(mesh)
            self._forget(mesh)
        self._beat.set()
