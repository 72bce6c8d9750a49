"""A worker that keeps its procs running for the next controller when its controller leaves.

It has at most one controller at a time, its holder, which takes control with ``TakeOver``. Without a holder, ranks keep
running, and their output is stored in their logs. The last holder leaves a record with everything that the next one
needs; the worker stores it without reading it. The worker ends when it has no holder for longer than its idle limit, or
has neither a holder nor procs to keep.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time

import msgspec

from monarch_kernel import environment
from monarch_kernel._version import __version__
from monarch_kernel.protocol.kept_mesh import (
    DESCRIPTION,
    FILES,
    FOLDER,
    PROCS,
    Adopt,
    EndKept,
    Hear,
    Held,
    Keep,
    KeptInfo,
    KeptMesh,
    KeptRank,
    LetGo,
    LookAtKept,
    ReadKeptLogs,
    Taken,
    TakeOver,
)
from monarch_kernel.protocol.messages import (
    ERROR,
    OK,
    Death,
    DeathKind,
    OutputChunk,
    OutputEnd,
    ProcRef,
    Reply,
    SetPlacement,
    Shutdown,
    SpawnProcs,
    can_meet,
    encode,
)
from monarch_kernel.protocol.output_records import MARKER
from monarch_kernel.protocol.placement import Placement
from monarch_kernel.protocol.private_files import PrivateFolder
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.host import cleanup, forkserver
from monarch_kernel.runtime.host.agent import Agent, _reply
from monarch_kernel.runtime.host.procs import Proc
from monarch_kernel.runtime.host.worker_agent import ORPHAN_GRACE, WorkerAgent
from monarch_kernel.runtime.host.worker_start import WorkerConfig
from monarch_kernel.runtime.node.interfaces import PeerLink
from monarch_kernel.runtime.node.link import Link

log = logging.getLogger(__name__)

#: How much missed output of all ranks a new holder gets (bytes). The logs have more.
BACKLOG_OF_ALL = 64 * 1024 * 1024
#: How long an update of the description may be delayed (seconds).
_DESCRIBE_DELAY = 0.05


class KeeperAgent(WorkerAgent):
    """The host agent of a kept mesh.

    Args: as ``WorkerAgent``; ``config.start.keep`` is its folder.
    """

    def __init__(self, config: WorkerConfig, server: socket.socket, server_pid: int) -> None:
        super().__init__(config, server, server_pid)
        folder = self._folder = PrivateFolder.open(config.start.keep)
        folder.hold(config.start.folder_lock, FOLDER)
        os.close(config.start.folder_lock)  # the folder has its own descriptor of it
        self._record: dict[str, bytes] = {}
        self._holder: ProcRef | None = None
        self._holders: set[str] = set()  # all holders so far
        self._placement: Placement | None = None  # the last holder's, also while there is none
        self._hears = False
        self._backlog: dict[tuple[str, int], int] = {}  # undelivered bytes, by proc and stream
        self._sizes: dict[str, dict[str, int]] = {}
        self._since = time.time()
        self._free_since = self._since
        self._describing = False
        self._node.handle(Keep, self._on_keep)
        self._node.handle(TakeOver, self._on_take_over)
        self._node.handle(Hear, self._on_hear)
        self._node.handle(LetGo, self._on_let_go)
        self._node.handle(LookAtKept, self._on_look)
        self._node.handle(ReadKeptLogs, self._on_read_logs)
        self._node.handle(EndKept, self._on_end_kept)

    # -- life -------------------------------------------------------------------------------------

    def _before_ready(self) -> None:
        self._folder.replace(DESCRIPTION, self._description())  # a controller finds a kept mesh by this file

    def _is_used(self) -> bool:
        return self._holder is not None

    def _leave(self, why: str) -> None:
        self._give_up_name()
        super()._leave(why)

    def _on_shutdown(self, link: PeerLink, message: Shutdown, body: Body) -> None:
        self._give_up_name()
        super()._on_shutdown(link, message, body)

    def _clean_up(self) -> None:
        super()._clean_up()
        self._give_up_name()

    def _give_up_name(self) -> None:
        """Release the mesh's name at once, so that a new mesh can use it while this one ends."""
        folder = self._folder
        if folder.lock_fd < 0:
            return
        left = folder.remove(FILES)
        if left:
            from monarch_kernel.display.quantities import few  # agents seldom need it

            log.warning("the folder %s stays: it holds what is not ours: %s", folder.path, few(left))
        folder.close()

    # -- the holder ---------------------------------------------------------------------------------

    def _on_take_over(self, link: PeerLink, message: TakeOver, _body: Body) -> None:
        holder = self._holder
        if self._leaving or self._folder.lock_fd < 0:
            _reply(link, message.call, msgspec.msgpack.encode(Held("it is ending")))
            return
        if holder is not None and holder.id != link.peer and not message.force:
            pid = self._node.pids.get(holder.id, 0)
            refusal = Held(f"process {pid} on {holder.host} holds it", held=True)
            _reply(link, message.call, msgspec.msgpack.encode(refusal))
            return
        if holder is not None and holder.id != link.peer:
            self._tell(holder.id, Taken(link.pid, self._node.refs[link.peer].host))
            self._release()
        holder = self._holder = self._node.refs[link.peer]
        self._holders.add(holder.id)
        log.info("%s of %s holds it now", holder.id, holder.host)
        deaths: dict[str, Death] = {}
        pids: dict[str, int] = {}
        for proc in self._procs.values():
            proc.root = proc.root or holder.id
            proc.owner = proc.owner or holder.id
            if proc.exit is not None:
                deaths[proc.id] = proc.exit.death()
            elif proc.state == "alive":
                pids[proc.id] = proc.pid
                if proc.root == holder.id and not proc.tool:
                    self._tell(proc.id, Adopt(holder))
        self._free_since = 0.0
        self._note_use()
        self._write_description()
        held = Held("", self._record, deaths, pids, self._start_options.idle)
        _reply(link, message.call, msgspec.msgpack.encode(held))

    def _on_let_go(self, link: PeerLink, message: LetGo, _body: Body) -> None:
        if self._holder is not None and self._holder.id == link.peer:
            self._release()
            self._end_if_empty()
        _reply(link, message.call)

    def _release(self) -> None:
        """Drop the holder; the procs that it owned then have no owner."""
        holder = self._holder
        assert holder is not None
        self._holder, self._hears = None, False
        for proc in self._procs.values():
            if proc.tool:
                continue  # it ends when the holder does
            if proc.root == holder.id:
                proc.root = ""
            if proc.owner == holder.id:
                proc.owner = ""
            proc.watchers.discard(holder.id)
        self._free_since = time.time()
        self._note_use()
        self._write_description()

    def _end_if_empty(self) -> None:
        if not any(key.startswith(PROCS) for key in self._record) and not self._leaving:
            self._leave("there is nothing to keep")

    def _on_peer_dead(self, peer: str, death: Death) -> None:
        mine = self._holder is not None and peer == self._holder.id
        if mine:
            log.info("%s is gone (%s); its mesh is kept", peer, death.cause)
            self._release()
        super()._on_peer_dead(peer, death)
        if mine:
            self._end_if_empty()

    def _on_keep(self, link: PeerLink, message: Keep, body: Body) -> None:
        if self._holder is None or link.peer != self._holder.id:
            return  # from a former holder, after a takeover
        if len(body):
            self._record[message.key] = bytes(body)
        else:
            self._record.pop(message.key, None)

    # -- ranks --------------------------------------------------------------------------------------

    def _on_place(self, link: PeerLink, message: SetPlacement, body: Body) -> None:
        if self._holder is not None and link.peer == self._holder.id:
            self._placement = message.placement
        super()._on_place(link, message, body)

    def _placement_of(self, message: SpawnProcs) -> Placement | None:
        return self._placement if self._keeps(message) else super()._placement_of(message)

    def _keeps(self, message: SpawnProcs) -> bool:
        return message.root.id in self._holders and not message.tool

    def _is_late(self, message: SpawnProcs) -> bool:
        if not self._keeps(message):
            return super()._is_late(message)
        return message.owner.id in self._node.deaths  # a mesh without a controller may still grow

    def _on_spawn(self, link: PeerLink, message: SpawnProcs, body: Body) -> None:
        super()._on_spawn(link, message, body)
        holder = self._holder.id if self._holder is not None else ""
        self._sizes[message.mesh] = dict(zip(message.labels, message.sizes, strict=True))
        for spec in message.procs:
            proc = self._procs.get(spec.id)
            if proc is not None and proc.root in self._holders and not proc.tool:
                proc.root = holder
        self._describe()

    def _mark(self, message: SpawnProcs) -> None:
        if self._keeps(message):
            message.env[cleanup.ROOT_MARKER] = self._node.id
        else:
            super()._mark(message)

    def _must_preload(self, failed: forkserver.TemplateFailed | None) -> bool:
        return Agent._must_preload(self, failed)  # the worker is on its controller's machine, which has the modules

    def _on_hello(self, link: PeerLink) -> None:
        super()._on_hello(link)
        proc = self._procs.get(link.peer)
        if proc is not None and not proc.tool and self._holder is not None and proc.root == self._holder.id:
            link.send(encode(Adopt(self._holder)))
        self._describe()

    def _exited(self, proc: Proc, status: int, cause: str, kind: DeathKind = DeathKind.EXITED) -> None:
        super()._exited(proc, status, cause, kind)
        self._describe()

    # -- programs of the same user that are not controllers -----------------------------------------

    def _on_look(self, link: PeerLink, message: LookAtKept, _body: Body) -> None:
        if self._refuses(link, message):
            return
        now = {(proc.mesh, proc.rank): proc.id for proc in self._procs.values() if not proc.tool}  # the last successor
        found: list[KeptRank] = []
        for (mesh, rank), name in now.items():
            told = self._status_of(name)
            figures = (told.rss_bytes, told.cpu_percent, told.uptime_s)
            found.append(KeptRank(mesh, rank, name, told.state, told.pid, told.cause, *figures))
        _answer(link, message.call, msgspec.msgpack.encode(found))

    def _on_read_logs(self, link: PeerLink, message: ReadKeptLogs, _body: Body) -> None:
        if not self._refuses(link, message):
            _answer(link, message.call, msgspec.msgpack.encode(self._logs_of(message.procs, message.tail)))

    def _on_end_kept(self, link: PeerLink, message: EndKept, _body: Body) -> None:
        if self._refuses(link, message):
            return
        holder = self._holder
        if self._leaving or self._folder.lock_fd < 0:
            _answer(link, message.call, b"it is ending already", ERROR)
            return
        if holder is not None and not message.force:
            text = f"process {self._node.pids.get(holder.id, 0)} on {holder.host} holds it"
            _answer(link, message.call, text.encode(), ERROR)
            return
        if holder is not None:
            self._tell(holder.id, Taken(message.pid, self._node.ref.host))
            self._release()
        self._give_up_name()
        self._withdraw("")
        self._leaving = "it was ended by another program"
        self._shut_down(self._leaving, ORPHAN_GRACE, lambda: _answer(link, message.call, b""))

    def _refuses(self, link: PeerLink, message: LookAtKept | ReadKeptLogs | EndKept) -> bool:
        """Return whether to refuse the sender: it is on another machine (no answer), or has another version (error)."""
        if not isinstance(link, Link):
            return True
        if can_meet(message.version, message.oldest):
            return False
        text = f"it runs monarch_kernel {__version__}, but this is {message.release}: use the same version"
        _answer(link, message.call, text.encode(), ERROR)
        return True

    # -- output -------------------------------------------------------------------------------------

    def _forward(self, proc: Proc, stream: int, data: bytes) -> None:
        if not proc.owner or (not self._hears and self._holder is not None and proc.owner == self._holder.id):
            key = (proc.id, stream)
            self._backlog[key] = self._backlog.get(key, 0) + len(data)
        else:
            super()._forward(proc, stream, data)

    def _on_hear(self, link: PeerLink, message: Hear, _body: Body) -> None:
        told: dict[str, tuple[int, int]] = {}
        mine = [proc for proc in self._procs.values() if proc.owner == link.peer]
        limit = min(environment.BACKLOG.get(), BACKLOG_OF_ALL // max(1, len(mine)))
        for proc in mine:
            sent = left = 0
            for stream in (1, 2):
                missed = self._backlog.pop((proc.id, stream), 0)
                if missed:
                    data = newest(proc.logs[stream].read(), missed, limit)
                    self._tell(link.peer, OutputChunk(proc.id, stream), data)
                    sent += len(data)
                    left += missed - len(data)
            if proc.drained:
                self._tell(link.peer, OutputEnd(proc.id))
            if sent or left:
                told[proc.id] = (sent, left)
        self._hears = True
        _reply(link, message.call, msgspec.msgpack.encode(told))

    # -- its description ------------------------------------------------------------------------------

    def _describe(self) -> None:
        """Schedule a write of the description. The delay merges the many updates of a mesh's start or end."""
        if not self._describing:
            self._describing = True
            self._poller.call_later(_DESCRIBE_DELAY, self._write_description)

    def _write_description(self) -> None:
        self._describing = False
        if self._folder.lock_fd >= 0:
            with contextlib.suppress(OSError):  # on a full disk the previous one remains
                self._folder.replace(DESCRIPTION, self._description())

    def _description(self) -> bytes:
        counts: dict[str, list[int]] = {}
        for proc in self._procs.values():
            # A successor counts as the same rank as its predecessors.
            count = counts.setdefault(proc.mesh, [0, 0])
            count[0] += "~" not in proc.id
            count[1] += proc.exit is None
        holder = self._holder
        info = KeptInfo(
            name=os.path.basename(self._folder.path),
            pid=os.getpid(),
            url=self._address.listen,
            host=self._node.ref.host,
            since=self._since,
            held_by=self._node.pids.get(holder.id, 0) if holder is not None else 0,
            free_since=self._free_since,
            idle=self._start_options.idle,
            meshes=[KeptMesh(name, self._sizes.get(name, {}), *count) for name, count in counts.items()],
        )
        return msgspec.json.encode(info)


def _answer(link: PeerLink, call: int, body: bytes, status: int = OK) -> None:
    link.send(encode(Reply(call, 0, status)), body)


def newest(text: bytes, missed: int, limit: int) -> bytes:
    """Return the undelivered end of a log: at most ``limit`` bytes, starting at a record or a line."""
    whole = min(missed, len(text))
    size = min(whole, limit)
    tail = text[len(text) - size :]
    if size == missed:
        return tail
    record, line = tail.find(MARKER), tail.find(b"\n") + 1
    starts = [at for at in (record, line) if 0 < at < len(tail)] if not tail.startswith(MARKER) else [0]
    return tail[min(starts) :] if starts else tail
