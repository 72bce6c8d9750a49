"""A process's part in the data plane: what it has registered, which backends it has, and the messages between the two.

One engine per node, made when first needed. An operation is done at once in the calling thread if it is short, else
on a thread of the engine's; either way it gives a Future. What owners must do themselves (atomics, drops, copies
through segments) is asked for by a message, which whoever polls there handles; long copies are handed to threads.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from monarch_kernel.protocol.messages import (
    ERROR,
    OK,
    BufferAtomic,
    BufferDrop,
    BufferRead,
    BufferWrite,
    Death,
    Reply,
    encode,
)
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.transfer import hugepages, settings
from monarch_kernel.runtime.transfer.asking import Ask, Obituary
from monarch_kernel.runtime.transfer.backend import Backend
from monarch_kernel.runtime.transfer.cma import Cma
from monarch_kernel.runtime.transfer.copying import copy
from monarch_kernel.runtime.transfer.errors import RDMAError, RDMATimeoutError, Unfit
from monarch_kernel.runtime.transfer.handle import Handle, Op
from monarch_kernel.runtime.transfer.local import Local
from monarch_kernel.runtime.transfer.memory import Layout, Memory, address_of
from monarch_kernel.runtime.transfer.pool import Pool
from monarch_kernel.runtime.transfer.seam import current_node
from monarch_kernel.runtime.transfer.segment import Segment, bytes_of, received
from monarch_kernel.runtime.transfer.table import Gone, Peer, Table, machine, start_of

#: Requests for at most so many bytes are served by the thread that polls.
SERVE_INLINE = 64 << 10
#: How long an error waits for the cause of the owner's death (seconds).
CAUSE_WAIT = 0.5
#: How often it is looked whether the last transfers from and to a dropped buffer have ended (seconds).
DROP_POLL = 0.002
#: How often pending requests are looked over for deadlines that have passed (seconds).
SWEEP = 0.25

#: Best first.
BACKENDS = (Local, Cma, Segment)

_WORD_MAX = (1 << 64) - 1
_DROPPED = "the buffer was dropped"
_NOTHING = Memory(Layout(0, (), 0), None)


@dataclass(slots=True)
class Registration:
    """Memory of this process that others may reach."""

    memory: Memory
    slot: int
    users: int = 0  # transfers of this process that are under way
    dropped: Future[None] | None = None


class Engine:
    """This process's registrations and transfers."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.machine = machine()
        #: For transfers that this process began; and for copies that others asked for. Two, so that two processes
        #: which wait for each other's copies can never have all their threads waiting.
        self.work = Pool("monarch-transfer", 8)
        self.serve = Pool("monarch-transfer-serve", 2)
        self.pid = os.getpid()
        self._pages = Pool("monarch-transfer-pages", 1)
        self._started = start_of(self.pid)
        self._table = Table()
        self._registered: dict[int, Registration] = {}
        self._peers: dict[tuple[int, int], Peer] = {}
        self._guard = threading.Lock()
        self._asks: set[Ask] = set()
        self._sweeping = False
        self.backends: list[Backend] = [backend(self) for backend in BACKENDS if backend.available()]
        node.handlers.update(
            {
                BufferRead: self._on_read,
                BufferWrite: self._on_write,
                BufferAtomic: self._on_atomic,
                BufferDrop: self._on_drop,
            }
        )
        node.on_peer_dead.append(self._on_peer_dead)

    # -- registering ------------------------------------------------------------------------------

    def register(self, memory: Memory) -> Handle:
        """Let every process that gets the handle reach this memory, until it is dropped."""
        key = secrets.randbits(64) or 1
        slot = self._table.enter(key)
        self._registered[key] = Registration(memory, slot)
        layout = memory.layout
        if hugepages.worth_it(layout):
            self._pages.run(lambda: hugepages.collapse(layout, lambda: self._wanted(key)))
        return Handle(
            self.node.ref,
            self.machine,
            self.pid,
            self._started,
            self._table.fd,
            slot,
            key,
            layout.address,
            layout.dims,
            layout.run,
            memory.why_readonly,
            memory.signed,
        )

    def _wanted(self, key: int) -> bool:
        registration = self._registered.get(key)
        return registration is not None and registration.dropped is None and not self.node._closed

    @contextmanager
    def held(self, key: int, what: Any = "") -> Generator[Registration, None, None]:
        """A registration of this process, kept from being let go. ``what`` is for, as the error shall say."""
        with self._guard:
            registration = self._registered.get(key)
            if registration is None or registration.dropped is not None:
                raise RDMAError(f"{what} failed: {_DROPPED}" if what else _DROPPED, self.node.id)
            registration.users += 1
        try:
            yield registration
        finally:
            with self._guard:
                registration.users -= 1

    def drop(self, handle: Handle, deadline: float | None) -> Future[None]:
        """Let a buffer go, here or at its owner. One that is gone already is no error."""
        done: Future[None] = Future(self.node.poller, f"drop of a buffer of {handle.who}")
        if handle.owner.id == self.node.id:
            self._drop_here(handle.key, done, deadline)
            return done

        def settle(ask: Future[Any]) -> None:
            error = ask.exception()
            if error is None or self._dead(handle):
                done._resolve(None)
            else:
                done._reject(error)

        ask = self.ask(handle, lambda call: (BufferDrop(call, handle.key), b""), done.what, deadline)
        ask.add_done_callback(settle)
        return done

    def _drop_here(self, key: int, done: Future[None], deadline: float | None) -> None:
        def give_up() -> None:
            done._reject(RDMATimeoutError(f"{done.what}: transfers are still under way", self.node.id))

        dropped = self._drop(key)
        if not dropped.done() and deadline is not None:
            timer = self.node.poller.call_later(max(0.0, deadline - time.monotonic()), give_up)
            done.add_done_callback(lambda _done: timer.cancel())
        dropped.add_done_callback(lambda _dropped: done._resolve(None))

    def _drop(self, key: int) -> Future[None]:
        with self._guard:
            registration = self._registered.get(key)
            if registration is not None and registration.dropped is not None:
                return registration.dropped
            done: Future[None] = Future(self.node.poller, "drop of a buffer")
            if registration is None:
                done._resolve(None)
                return done
            registration.dropped = done
        self._table.revoke(registration.slot)
        self._let_go(key, registration)
        return done

    def _let_go(self, key: int, registration: Registration) -> None:
        with self._guard:
            quiet = not registration.users and self._table.quiet(registration.slot)
            if quiet:
                del self._registered[key]
        if not quiet:
            self.node.poller.call_later(DROP_POLL, lambda: self._let_go(key, registration))
        elif registration.dropped is not None:
            registration.memory = _NOTHING
            registration.dropped._resolve(None)

    # -- choosing a backend ------------------------------------------------------------------------

    def peer(self, handle: Handle) -> Peer:
        """The owner's process, which is of this machine."""
        key = (handle.pid, handle.started)
        with self._guard:
            peer = self._peers.get(key)
        if peer is None:
            if handle.owner.id in self.node.deaths:
                raise Gone
            peer = Peer(handle.pid, handle.started, handle.table)
            with self._guard:
                peer = self._peers.setdefault(key, peer)
        return peer

    def _on_peer_dead(self, proc: str, _death: Death) -> None:
        pid = self.node.pids.get(proc)
        with self._guard:
            for key in [key for key in self._peers if key[0] == pid]:
                del self._peers[key]

    def candidates(self, handle: Handle) -> list[Backend]:
        """The backends that reach a buffer from here, best first.

        Raises:
            RDMAError: there is none; says why of each.
        """
        only = settings.forced()
        reasons: list[str] = []
        found: list[Backend] = []
        for backend in self.backends:
            if only is None or backend.name == only:
                why = backend.bars(handle)
                if why:
                    reasons.append(f"{backend.name}: {why}")
                else:
                    found.append(backend)
        if found:
            return found
        if only is not None and not reasons:
            reasons.append(f"{only}: not available here")
        setting = f" (forced by {settings.VARIABLE} or configure())" if only is not None else ""
        raise RDMAError(f"no way from here to a buffer of {handle.who}: {'; '.join(reasons)}{setting}", handle.owner.id)

    # -- transferring --------------------------------------------------------------------------------

    def transfer(self, ops: list[Op], timeout: float | None) -> Future[None]:
        """Do all of them, those with one owner one after the other; done when all have ended."""
        deadline = deadline_in(timeout)
        done: Future[None] = Future(self.node.poller)
        if self._short(ops):
            try:
                with self.node.poller.shielded():
                    for op in ops:
                        self._inline(op, deadline)
            except (Unfit, Gone):
                pass  # what to do now takes longer
            except Exception as e:
                done._reject(e)
                return done
            else:
                done._resolve(None)
                return done
        done.what = str(ops[0]) if len(ops) == 1 else f"{len(ops)} transfers"
        groups: dict[str, list[Op]] = {}
        for op in ops:
            groups.setdefault(op.handle.owner.id, []).append(op)
        _Batch(self, done, list(groups.values()), deadline)
        # Nobody may be waiting yet, and the answers must be heard.
        self.node.poller.start_background()
        return done

    def _short(self, ops: list[Op]) -> bool:
        left = 1 << 20
        for op in ops:
            left -= op.size
            if left < 0:
                return False
        return True

    def _inline(self, op: Op, deadline: float | None) -> None:
        backend = self.candidates(op.handle)[0]
        if op.size > backend.inline:
            raise Unfit
        backend.move(op, deadline)

    def execute(self, op: Op, deadline: float | None) -> None:
        """Do one transfer by the best backend that can; blocks."""
        try:
            for backend in self.candidates(op.handle):
                try:
                    backend.move(op, deadline)
                    return
                except Unfit:
                    continue
            self.candidates(op.handle)  # says why none is left
            raise RDMAError(f"{op} failed: no backend could do it", op.handle.owner.id)
        except Gone:
            with self._guard:
                self._peers.pop((op.handle.pid, op.handle.started), None)
            raise self.died(op.handle, str(op)) from None

    # -- errors --------------------------------------------------------------------------------------

    def dropped(self, op: Op) -> RDMAError:
        """What a transfer of a dropped buffer raises."""
        return RDMAError(f"{op} failed: {_DROPPED}", op.handle.owner.id)

    def _dead(self, handle: Handle) -> bool:
        return handle.owner.id in self.node.deaths

    def died(self, handle: Handle, what: str) -> RDMAError:
        """What a transfer from or to a dead process raises; waits a moment for the cause."""
        node = self.node
        death = node.deaths.get(handle.owner.id)
        if death is None and not node.poller.in_leader():
            obituary = Obituary(node, handle.owner)
            try:
                death = obituary.get(CAUSE_WAIT)
            except TimeoutError:
                pass
            finally:
                obituary.end()
        return RDMAError(self.obituary(handle, what, death), handle.owner.id)

    def obituary(self, handle: Handle, what: str, death: Death | None) -> str:
        """The sentence for it."""
        cause = f": {death.cause}" if death is not None and death.cause else ""
        return f"{what} failed: the buffer's owner, {handle.who}, is gone{cause}"

    # -- asking owners ---------------------------------------------------------------------------------

    def ask(
        self,
        handle: Handle,
        message: Callable[[int], tuple[Any, Any]],
        what: str,
        deadline: float | None,
    ) -> Ask:
        """Send the owner a message (header and body, for a call number); a Future of the answer's body and buffers."""
        node = self.node
        node.learn(handle.owner)
        ask = Ask(self, handle, what, deadline)
        header, body = message(ask.number)
        if not node.send(handle.owner.id, header, body):
            ask.on_peer_dead(handle.owner.id, node.deaths[handle.owner.id])
        if deadline is not None and not ask.done():
            self._asks.add(ask)
            if not self._sweeping:
                self._sweeping = True
                node.poller.call_later(max(0.0, min(SWEEP, deadline - time.monotonic())), self._sweep)
        return ask

    def answered(self, ask: Ask) -> None:
        """Called by an ask when it has its answer."""
        self._asks.discard(ask)

    def _sweep(self) -> None:
        now = time.monotonic()
        nearest = now + SWEEP
        for ask in list(self._asks):
            if ask.deadline is not None and ask.deadline <= now:
                ask.expire()
            elif ask.deadline is not None:
                nearest = min(nearest, ask.deadline)
        self._sweeping = bool(self._asks)
        if self._sweeping:
            self.node.poller.call_later(nearest - now, self._sweep)

    # -- atomics ----------------------------------------------------------------------------------------

    def atomic(
        self, handle: Handle, offset: int, operand: int, expected: int | None, timeout: float | None
    ) -> Future[int]:
        """Change one word; a Future of the word before, unsigned."""
        verb = "fetch_add" if expected is None else "compare_and_swap"
        what = f"{verb} at byte {offset} of a buffer of {handle.size} bytes of {handle.who}"
        if handle.owner.id == self.node.id:
            done: Future[int] = Future(self.node.poller, what)
            try:
                done._resolve(self._change(handle.key, offset, operand, expected, what))
            except RDMAError as e:
                done._reject(e)
            return done
        ask = self.ask(
            handle,
            lambda call: (BufferAtomic(call, handle.key, offset, operand, expected), b""),
            what,
            deadline_in(timeout),
        )
        return ask.then(lambda answer: int.from_bytes(answer[0], "little"))

    def _change(self, key: int, offset: int, operand: int, expected: int | None, what: str = "") -> int:
        with self.held(key, what) as registration:
            part = _within(registration, offset, 8).part(offset, offset + 8)
            if part is None or not part.contiguous or part.address % 8 or registration.memory.why_readonly:
                raise RDMAError(f"there is no aligned, writable 8-byte word at byte {offset}", self.node.id)
            word = ctypes.c_uint64.from_address(part.address)
            with self._guard:
                before = word.value
                if expected is None:
                    word.value = (before + operand) & _WORD_MAX
                elif before == expected:
                    word.value = operand
            return before

    # -- being asked --------------------------------------------------------------------------------------

    def _on_read(self, link: Any, message: BufferRead, _body: Any) -> None:
        def serve() -> None:
            with self._answering(link, message.call), self.held(message.buffer) as registration:
                data = bytes_of(_within(registration, message.offset, message.size), message.offset, message.size)
                buffers = (message.size,)
                body, segment = self.node.pack([data, b""], buffers, [link.peer])
                link.send(encode(Reply(message.call, 0, OK, buffers, segment)), body)

        self._serve(message.size, serve)

    def _on_write(self, link: Any, message: BufferWrite, body: Any) -> None:
        size = message.buffers[0]
        data = self.node.apart(message.segment, body) if message.segment is not None else body

        def serve() -> None:
            nonlocal data
            with self._answering(link, message.call), self.held(message.buffer) as registration:
                layout = _within(registration, message.offset, size)
                if registration.memory.why_readonly:
                    raise RDMAError(registration.memory.why_readonly, self.node.id)
                with received(data, message.buffers) as view:
                    copy(layout, message.offset, Layout(address_of(view), (), size), 0, size)
                del view
                data = None  # the segment goes back before the answer
                link.send(encode(Reply(message.call, 0, OK)), b"")

        self._serve(size, serve)

    def _on_atomic(self, link: Any, message: BufferAtomic, _body: Any) -> None:
        with self._answering(link, message.call):
            before = self._change(message.buffer, message.offset, message.operand, message.expected)
            link.send(encode(Reply(message.call, 0, OK)), before.to_bytes(8, "little"))

    def _on_drop(self, link: Any, message: BufferDrop, _body: Any) -> None:
        self._drop(message.buffer).add_done_callback(
            lambda _done: link.send(encode(Reply(message.call, 0, OK)), b""),
        )

    def _serve(self, size: int, job: Callable[[], None]) -> None:
        if size <= SERVE_INLINE:
            job()
        else:
            self.serve.run(job)

    @contextmanager
    def _answering(self, link: Any, call: int) -> Generator[None, None, None]:
        try:
            yield
        except Exception as e:
            text = str(e) if isinstance(e, RDMAError) else f"{type(e).__name__}: {e}"
            link.send(encode(Reply(call, 0, ERROR)), text.encode())

    def close(self) -> None:
        """Give up what is registered; for an engine whose node is closed."""
        self._registered.clear()
        self._peers.clear()
        self._table.close()


class _Batch:
    """Transfers with several owners at once; the first failure is the batch's, but only when all have ended."""

    def __init__(self, engine: Engine, done: Future[None], groups: list[list[Op]], deadline: float | None) -> None:
        self._engine = engine
        self._done = done
        self._deadline = deadline
        self._left = len(groups)
        self._error: Exception | None = None
        self._guard = threading.Lock()
        for group in groups:
            engine.work.run(lambda group=group: self._run(group))

    def _run(self, ops: list[Op]) -> None:
        error: Exception | None = None
        try:
            for op in ops:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    raise RDMATimeoutError(f"{op} did not begin in time", op.handle.owner.id)
                self._engine.execute(op, self._deadline)
        except Exception as e:
            error = e
        with self._guard:
            self._error = self._error or error
            self._left -= 1
            last = not self._left
        if last:
            if self._error is not None:
                self._done._reject(self._error)
            else:
                self._done._resolve(None)


def _within(registration: Registration, offset: int, size: int) -> Layout:
    layout = registration.memory.layout
    if offset < 0 or size < 0 or offset + size > layout.nbytes:
        raise RDMAError(f"bytes {offset} to {offset + size} are not within its {layout.nbytes} bytes")
    return layout


def deadline_in(timeout: float | None) -> float | None:
    """The time when ``timeout`` seconds have passed."""
    return None if timeout is None else time.monotonic() + timeout


_engine: Engine | None = None
_guard = threading.Lock()


def engine() -> Engine:
    """This process's engine."""
    global _engine
    node = current_node()
    current = _engine
    if current is not None and current.node is node:
        return current
    with _guard:
        if _engine is None or _engine.node is not node:
            if _engine is not None:
                _engine.close()
            _engine = Engine(node)
        return _engine
