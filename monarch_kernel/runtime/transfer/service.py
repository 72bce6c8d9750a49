"""The transfer engine of a process: its registrations, backends, and requests to owners of buffers.

There is one engine per node, created on first use. A short operation runs at once on the calling thread, a longer one
on a thread of the engine; both return a Future. A message requests work that the owner must do itself (atomics, drops,
copies through segments). The owner's polling thread handles it; long copies run on other threads.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from monarch_kernel import environment
from monarch_kernel.protocol.messages import (
    ERROR,
    OK,
    BufferAtomic,
    BufferDrop,
    BufferOffer,
    BufferRead,
    BufferWrite,
    Death,
    Reply,
    encode,
)
from monarch_kernel.runtime.node import recorder
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.node import Node, current_node
from monarch_kernel.runtime.transfer import backend_settings, device
from monarch_kernel.runtime.transfer.backends import (
    Backend,
    BackendContext,
    Cma,
    CudaIpc,
    Segment,
    StatelessBackend,
    bytes_of,
    received,
)
from monarch_kernel.runtime.transfer.errors import Gone, RDMAError, RDMATimeoutError, Unfit
from monarch_kernel.runtime.transfer.handle import Handle, Op, OwnerRequest, await_death, death_text
from monarch_kernel.runtime.transfer.memory import SCRATCH, Layout, Memory, address_of
from monarch_kernel.runtime.transfer.registration_table import (
    PeerProcess,
    Registration,
    RegistrationTable,
    machine,
    start_of,
)
from monarch_kernel.runtime.transfer.tcp import Tcp
from monarch_kernel.runtime.transfer.thread_pool import ThreadPool

if TYPE_CHECKING:
    from monarch_kernel.runtime.node.interfaces import PeerLink

# The registry of backends, best first. Add a new backend here and to ``environment.BACKENDS``.


class Local(StatelessBackend):
    """Copies within the process."""

    name = "local"
    inline = 1 << 20
    devices = True

    def __init__(self, engine: BackendContext) -> None:
        self._engine = engine

    @staticmethod
    def available() -> bool:
        return True

    def bars(self, handle: Handle) -> str:
        return "" if handle.owner.id == self._engine.node.id else "its owner is another process"

    def move(self, op: Op, deadline: float | None) -> None:
        with self._engine.held(op.handle.key, op) as registration:
            if op.write:
                device.move(registration.memory, op.offset, op.memory, 0, op.size)
            else:
                device.move(op.memory, 0, registration.memory, op.offset, op.size)


def backend_types() -> list[type[Backend]]:
    """Return every backend of this installation, best first."""
    found: list[type[Backend]] = [Local, CudaIpc, Cma, Segment]
    if find_spec("pyverbs") is not None:
        from monarch_kernel.runtime.transfer.verbs.backend import Verbs

        found.append(Verbs)
    return [*found, Tcp]


def make_backends(engine: BackendContext) -> list[Backend]:
    """Return the backends that this process can use for its engine, best first."""
    kinds: list[Any] = [kind for kind in backend_types() if kind.available()]  # Any: a Protocol has no constructor
    return [kind(engine) for kind in kinds]


def why_no_verbs() -> str:
    """Return why there is no verbs backend here."""
    from monarch_kernel.runtime.transfer.verbs.backend import why_not

    return why_not() or "not available here"


#: The polling thread serves requests up to this size (bytes).
INLINE = 64 << 10
#: The first byte of the answer to an offer.
TAKEN, UNFIT = b"+", b"-"
#: The time that an error waits for the cause of the owner's death (seconds).
CAUSE_WAIT = 0.5
#: The interval at which a dropped buffer is checked for running transfers (seconds).
DROP_POLL = 0.002
#: The maximum number of registrations that a search checks.
SEARCHED = 256
#: The interval at which pending requests are checked for expired deadlines (seconds).
SWEEP = 0.25

_WORD_MAX = (1 << 64) - 1
_DROPPED = "the buffer was dropped"
_NOTHING = Memory(Layout(0, (), 0), None)


class TransferService:
    """The registrations and transfers of this process."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.machine = machine()
        #: Threads for this process's own transfers, and threads for copies that others requested. The pools are
        #: separate, so that two processes that wait for each other's copies never run out of threads.
        self.work = ThreadPool("monarch-transfer", 8)
        self.serve = ThreadPool("monarch-transfer-serve", 2)
        self.pid = os.getpid()
        self._pages = ThreadPool("monarch-transfer-pages", 1)
        self._started = start_of(self.pid)
        self._table = RegistrationTable()
        self._registered: dict[int, Registration] = {}
        self._peers: dict[tuple[int, int], PeerProcess] = {}
        self._guard = threading.Lock()
        self._asks: set[OwnerRequest] = set()
        self._sweeping = False
        self._warned = False
        self._closed = False
        self.backends: list[Backend] = make_backends(self)
        OwnerService(self)
        node.on_peer_dead.append(self._on_peer_dead)
        node.on_close.append(self.close)

    # -- registering ------------------------------------------------------------------------------

    def register(self, memory: Memory) -> Handle:
        """Register memory. Until it is dropped, every process with the handle can access it."""
        key = secrets.randbits(64) or 1
        slot = self._table.enter(key)
        self._registered[key] = Registration(memory, slot)
        layout = memory.layout
        if not memory.device and worth_collapsing(layout):
            self._pages.run(lambda: collapse_pages(layout, lambda: self._wanted(key)))
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
            memory.device,
        )

    def _wanted(self, key: int) -> bool:
        registration = self._registered.get(key)
        return registration is not None and registration.dropped is None and not self.node._closed

    @contextmanager
    def held(self, key: int, what: object = "") -> Generator[Registration, None, None]:
        """Hold a registration of this process for the context. ``what`` names the use in the error."""
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
        """Drop a buffer, here or at its owner. Dropping it again is not an error."""
        done: Future[None] = Future(self.node.poller, f"drop of a buffer of {handle.who}")
        if handle.owner.id == self.node.id:
            self._drop_own(handle.key, done, deadline)
            return done

        def settle(ask: Future[object]) -> None:
            error = ask.exception()
            if error is None or self._dead(handle):
                done._resolve(None)
            else:
                done._reject(error)

        ask = self.ask(handle, lambda call: (BufferDrop(call, handle.key), b""), done.what, deadline)
        ask.add_done_callback(settle)
        return done

    def _drop_own(self, key: int, done: Future[None], deadline: float | None) -> None:
        def give_up() -> None:
            done._reject(RDMATimeoutError(f"{done.what}: transfers are still under way", self.node.id))

        dropped = self.drop_here(key)
        if not dropped.done() and deadline is not None:
            timer = self.node.poller.call_later(max(0.0, deadline - time.monotonic()), give_up)
            done.add_done_callback(lambda _done: timer.cancel())
        dropped.add_done_callback(lambda _dropped: done._resolve(None))

    def drop_here(self, key: int) -> Future[None]:
        """Drop a registration of this process. The future is done when no transfer accesses it any longer."""
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
            for backend in self.backends:
                backend.dropped(key)
            registration.memory = _NOTHING
            registration.dropped._resolve(None)

    def registration_around(self, layout: Layout) -> int:
        """Return the key of a registration that contains all of ``layout``; 0 if none is found among ``SEARCHED``."""
        registered = self._registered.copy()
        if len(registered) > SEARCHED:
            return 0
        low, high = layout.span()
        for key, registration in registered.items():
            first, last = registration.memory.layout.span()
            if first <= low and high <= last and registration.dropped is None:
                return key
        return 0

    # -- choosing a backend ------------------------------------------------------------------------

    def peer(self, handle: Handle) -> PeerProcess:
        """Return the owner's process, which runs on this machine."""
        key = (handle.pid, handle.started)
        with self._guard:
            peer = self._peers.get(key)
        if peer is None:
            if handle.owner.id in self.node.deaths:
                raise Gone
            peer = PeerProcess(handle.pid, handle.started, handle.table)
            with self._guard:
                peer = self._peers.setdefault(key, peer)
        return peer

    def _on_peer_dead(self, proc: str, _death: Death) -> None:
        for backend in self.backends:
            backend.peer_dead(proc)
        pid = self.node.pids.get(proc)
        with self._guard:
            for key in [key for key in self._peers if key[0] == pid]:
                del self._peers[key]

    def elsewhere(self, handle: Handle) -> str:
        """Return why this process cannot share memory with a buffer's owner; "" if it can."""
        if handle.machine != self.machine:
            return "its owner is on another machine"
        return "" if handle.owner.site == self.node.ref.site else "its owner belongs to another worker or controller"

    def candidates(self, handle: Handle) -> Iterator[Backend]:
        """Yield the backends that reach a buffer from here, best first.

        Raises:
            RDMAError: there is none; the message has the reason for each.
        """
        only = backend_settings.forced()
        reasons: list[str] = []
        found = False
        for backend in self.backends:
            if only is None or backend.name == only:
                why = backend.bars(handle)
                if why:
                    reasons.append(f"{backend.name}: {why}")
                else:
                    found = True
                    yield backend
        if found:
            return
        if only is not None and not reasons:
            reasons.append(f"{only}: {why_no_verbs() if only == 'ibverbs' else 'not available here'}")
        setting = f" (forced by {environment.RDMA_BACKEND.name} or configure())" if only is not None else ""
        raise RDMAError(f"no backend reaches a buffer of {handle.who}: {'; '.join(reasons)}{setting}", handle.owner.id)

    # -- transferring --------------------------------------------------------------------------------

    def transfer(self, ops: list[Op], timeout: float | None) -> Future[None]:
        """Run all operations; those with the same owner run sequentially. The future is done when all have ended."""
        deadline = deadline_in(timeout)
        done: Future[None] = Future(self.node.poller)
        if recorder.recording is not None and ops:
            done.add_done_callback(recorder.recording.transfer(_summary(ops), sum(op.size for op in ops)))
        if self._short(ops):
            try:
                with self.node.poller.shielded():
                    for op in ops:
                        self._inline(op, deadline)
            except (Unfit, Gone):
                pass  # longer than the calling thread may wait
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
        # The process must receive answers even if no thread waits yet.
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
        backend = next(self.candidates(op.handle))
        if op.size > backend.inline or (op.memory.device and not backend.devices):
            raise Unfit
        backend.move(op, deadline)

    def execute(self, op: Op, deadline: float | None, warn: bool = True) -> None:
        """Run one transfer with the best suitable backend. Blocks.

        Args:
            warn: whether to warn if nothing faster than TCP is available.
        """
        unfit: dict[str, str] = {}  # the reason, by backend
        try:
            for backend in self.candidates(op.handle):
                if warn and backend.name == "tcp":
                    self._warn_of_tcp(op.handle, unfit)
                try:
                    if op.memory.device and not backend.devices:
                        _move_staged(backend, op, deadline)
                    else:
                        backend.move(op, deadline)
                    return
                except Unfit as e:
                    unfit[backend.name] = str(e)
            reasons = "; ".join(f"{name}: {why}" for name, why in unfit.items())
            raise RDMAError(f"{op} failed: no backend is left for it ({reasons})", op.handle.owner.id)
        except Gone:
            with self._guard:
                self._peers.pop((op.handle.pid, op.handle.started), None)
            raise self.died(op.handle, str(op)) from None

    def _warn_of_tcp(self, handle: Handle, unfit: dict[str, str]) -> None:
        if (
            self._warned
            or backend_settings.forced()
            or backend_settings.tcp_fallback()
            or handle.owner.site == self.node.ref.site
        ):
            return
        self._warned = True
        verbs = next((backend for backend in self.backends if backend.name == "ibverbs"), None)
        why = unfit.get("ibverbs") or (verbs.bars(handle) if verbs is not None else why_no_verbs())
        warnings.warn(
            f"RDMA buffers of {handle.owner.host} are moved by TCP: nothing faster is available (ibverbs: {why}). "
            "Accept that with configure(allow_tcp_fallback=True), or forbid it with "
            "configure(allow_tcp_fallback=False); docs/rdma.md says how to get ibverbs",
            backend_settings.RDMATcpFallbackWarning,
            stacklevel=1,
        )

    # -- errors --------------------------------------------------------------------------------------

    def dropped(self, op: Op) -> RDMAError:
        """Return the error of a transfer whose buffer was dropped."""
        return RDMAError(f"{op} failed: {_DROPPED}", op.handle.owner.id)

    def _dead(self, handle: Handle) -> bool:
        return handle.owner.id in self.node.deaths

    def died(self, handle: Handle, what: str) -> RDMAError:
        """Return the error of a transfer whose owner is dead. Waits briefly for the cause."""
        death = await_death(self.node, handle.owner, CAUSE_WAIT)
        return RDMAError(death_text(handle, what, death), handle.owner.id)

    # -- requests to owners ---------------------------------------------------------------------------------

    def ask(
        self,
        handle: Handle,
        message: Callable[[int], tuple[Any, Any]],
        what: str,
        deadline: float | None,
    ) -> OwnerRequest:
        """Send the owner a message (header and body, for a call number).

        Return a future of the reply's body and buffer lengths.
        """
        node = self.node
        node.learn(handle.owner)
        ask = OwnerRequest(node, handle, what, deadline, self._asks.discard)
        header, body = message(ask.number)
        if not node.send(handle.owner.id, header, body):
            ask.on_peer_dead(handle.owner.id, node.deaths[handle.owner.id])
        if deadline is not None and not ask.done():
            self._asks.add(ask)
            if not self._sweeping:
                self._sweeping = True
                node.poller.call_later(max(0.0, min(SWEEP, deadline - time.monotonic())), self._sweep)
        return ask

    def offer(self, handle: Handle, backend: str, request: bytes, deadline: float | None) -> bytes:
        """Make the owner's backend of that name prepare a buffer. Return its answer. Blocks.

        Raises:
            Unfit: the owner's backend cannot prepare it; the message has the reason.
            RDMAError: the buffer was dropped, or its owner is dead.
            RDMATimeoutError: no answer before the deadline.
        """
        what = f"setting up {backend} to a buffer of {handle.size} bytes of {handle.who}"
        ask = self.ask(handle, lambda call: (BufferOffer(call, handle.key, backend), request), what, deadline)
        answer = bytes(ask.get()[0])
        if answer[:1] == UNFIT:
            raise Unfit(answer[1:].decode())
        return answer[1:]

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
        """Change one word. Return a future of its previous value, unsigned."""
        verb = "fetch_add" if expected is None else "compare_and_swap"
        what = f"{verb} at byte {offset} of a buffer of {handle.size} bytes of {handle.who}"
        if handle.owner.id == self.node.id:
            done: Future[int] = Future(self.node.poller, what)
            try:
                done._resolve(self.change(handle.key, offset, operand, expected, what))
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

    def change(self, key: int, offset: int, operand: int, expected: int | None, what: str = "") -> int:
        """Perform an atomic on a registration of this process. Return the word's previous value."""
        with self.held(key, what) as registration:
            part = registration.within(offset, 8).part(offset, offset + 8)
            if part is None or not part.contiguous or part.address % 8 or registration.memory.why_readonly:
                raise RDMAError(f"there is no aligned, writable 8-byte word at byte {offset}", self.node.id)
            with self._guard:
                before = device.load(registration.memory, offset)
                if expected is None:
                    device.store(registration.memory, offset, (before + operand) & _WORD_MAX)
                elif before == expected:
                    device.store(registration.memory, offset, operand)
            return before

    def close(self) -> None:
        """Drop all registrations and close the backends, when the node closes."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
        for backend in self.backends:
            backend.close()
        self._registered.clear()
        self._peers.clear()
        self._table.close()


class _Batch:
    """Transfers with several owners at once. The batch fails with the first error, after all have ended."""

    def __init__(
        self, engine: TransferService, done: Future[None], groups: list[list[Op]], deadline: float | None
    ) -> None:
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
        op: Op | None = None
        try:
            for op in ops:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    raise RDMATimeoutError(f"{op} did not begin in time", op.handle.owner.id)
                self._engine.execute(op, self._deadline)
        except Exception as e:
            error = e
        # Release the caller's memory before the caller is notified: it may resize a bytearray at once.
        ops.clear()
        op = None
        with self._guard:
            self._error = self._error or error
            self._left -= 1
            last = not self._left
        if last:
            if self._error is not None:
                self._done._reject(self._error)
            else:
                self._done._resolve(None)


def _summary(ops: list[Op]) -> str:
    """Describe transfers for a trace."""
    verb = "RDMA write" if all(op.write for op in ops) else "RDMA" if any(op.write for op in ops) else "RDMA read"
    owners = sorted({op.handle.owner.id for op in ops})
    return f"{verb} {owners[0]}" if len(owners) == 1 else f"{verb} {len(owners)} processes"


def deadline_in(timeout: float | None) -> float | None:
    """Convert a timeout (seconds) to a deadline."""
    return None if timeout is None else time.monotonic() + timeout


_engine: TransferService | None = None
_guard = threading.Lock()


def transfer_service() -> TransferService:
    """Return this process's engine."""
    global _engine
    node = current_node()
    current = _engine
    if current is not None and current.node is node:
        return current
    with _guard:
        if _engine is None or _engine.node is not node:
            if _engine is not None:
                _engine.close()
            _engine = TransferService(node)
        return _engine


class OwnerService:
    """Handles the data plane's messages for an engine, on the polling thread. Long work runs on ``engine.serve``."""

    def __init__(self, engine: TransferService) -> None:
        self._engine = engine
        engine.node.handlers.update(
            {
                BufferRead: self._on_read,
                BufferWrite: self._on_write,
                BufferAtomic: self._on_atomic,
                BufferDrop: self._on_drop,
                BufferOffer: self._on_offer,
            }
        )

    def _on_read(self, link: PeerLink, message: BufferRead, _body: object) -> None:
        engine, at, size = self._engine, message.offset, message.size

        def serve() -> None:
            with self._answering(link, message.call), engine.held(message.buffer) as registration:
                registration.within(at, size)
                data = bytes_of(registration.memory, at, size)
                body, segment = engine.node.pack([data, b""], (size,), [link.peer])
                link.send(encode(Reply(message.call, 0, OK, (size,), segment)), body)

        self._serve(size, serve)

    def _on_write(self, link: PeerLink, message: BufferWrite, body: object) -> None:
        engine, size = self._engine, message.buffers[0]
        data = engine.node.apart(message.segment, body) if message.segment is not None else body

        def serve() -> None:
            nonlocal data
            with self._answering(link, message.call), engine.held(message.buffer) as registration:
                registration.within(message.offset, size, write=True)
                with received(data, message.buffers) as view:
                    device.scatter(registration.memory, message.offset, size, address_of(view))
                del view
                data = None  # releases the segment before the answer
                link.send(encode(Reply(message.call, 0, OK)), b"")

        self._serve(size, serve)

    def _on_atomic(self, link: PeerLink, message: BufferAtomic, _body: object) -> None:
        with self._answering(link, message.call):
            before = self._engine.change(message.buffer, message.offset, message.operand, message.expected)
            link.send(encode(Reply(message.call, 0, OK)), before.to_bytes(8, "little"))

    def _on_drop(self, link: PeerLink, message: BufferDrop, _body: object) -> None:
        self._engine.drop_here(message.buffer).add_done_callback(
            lambda _done: link.send(encode(Reply(message.call, 0, OK)), b""),
        )

    def _on_offer(self, link: PeerLink, message: BufferOffer, body: Any) -> None:
        engine, request = self._engine, bytes(body)

        def serve() -> None:
            with self._answering(link, message.call):
                with engine.held(message.buffer):
                    backend = next((b for b in engine.backends if b.name == message.backend), None)
                    try:
                        if backend is None:
                            raise Unfit(f"{message.backend} is not available at {engine.node.id}")
                        answer = TAKEN + backend.offer(message.buffer, request, link.peer)
                    except Unfit as e:
                        answer = UNFIT + str(e).encode()
                link.send(encode(Reply(message.call, 0, OK)), answer)

        engine.serve.run(serve)

    def _serve(self, size: int, job: Callable[[], None]) -> None:
        if size <= INLINE:
            job()
        else:
            self._engine.serve.run(job)

    @contextmanager
    def _answering(self, link: PeerLink, call: int) -> Generator[None, None, None]:
        try:
            yield
        except Exception as e:
            text = str(e) if isinstance(e, RDMAError) else f"{type(e).__name__}: {e}"
            link.send(encode(Reply(call, 0, ERROR)), text.encode())


# -- memory in huge pages ---------------------------------------------------------------------------

_HUGE = 2 << 20
#: How much is collapsed at a time (bytes). Between steps, ``wanted`` is checked.
_STEP = 8 * _HUGE
_MADV_COLLAPSE = 25

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def worth_collapsing(layout: Layout) -> bool:
    """Return whether the memory is large and has no large gaps."""
    low, high = layout.span()
    return 0 < _least_collapsed() <= layout.nbytes and high - low <= 2 * layout.nbytes


@cache
def _least_collapsed() -> int:
    """Return the minimum size of memory to collapse (bytes); 0: all memory."""
    return environment.RDMA_HUGEPAGES.get()


def collapse_pages(layout: Layout, wanted: Callable[[], bool]) -> None:
    """Move memory to huge pages, so that cross-memory attach is as fast as a memcpy. Has no effect before Linux 6.1.

    The kernel looks up every page of the other process that it copies from or to: with pages of 4 KiB, that costs twice
    as much as the copy itself (measured: 7 GB/s instead of 18); with pages of 2 MiB, nothing. NumPy requests huge pages
    for its arrays, PyTorch does not. Contents and addresses do not change, and other threads may use the memory
    meanwhile. Takes about as long as a slow copy.
    """
    low, high = layout.span()
    at, end = -(-low // _HUGE) * _HUGE, high // _HUGE * _HUGE
    while at < end and wanted():
        some = min(_STEP, end - at)
        # Other failures mean too little free memory, or another kind of memory, which is not changed.
        if _madvise(at, some, _MADV_COLLAPSE) and ctypes.get_errno() == 22:  # EINVAL
            return
        at += some


# -- GPU memory through CPU memory ------------------------------------------------------------------


def _move_staged(backend: Backend, op: Op, deadline: float | None) -> None:
    """Run a transfer with local GPU memory piece by piece through CPU memory."""
    for lo in range(0, op.size, SCRATCH):
        size = min(SCRATCH, op.size - lo)
        between = device.staging(size)
        address = ctypes.addressof(between)
        if op.write:
            device.gather(op.memory, lo, size, address)
        part = Op(op.write, op.handle, op.offset + lo, Memory(Layout(address, (), size), between), size)
        backend.move(part, deadline)
        if not op.write:
            device.scatter(op.memory, lo, size, address)
