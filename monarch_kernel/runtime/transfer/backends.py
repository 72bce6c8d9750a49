"""Backends of the data plane: their interface, and those for ranks of one host."""

from __future__ import annotations

import ctypes
import errno
import inspect
import os
import pickle
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from monarch_kernel import environment
from monarch_kernel.protocol.messages import BufferRead, BufferWrite
from monarch_kernel.protocol.private_files import remove_torch_memory
from monarch_kernel.protocol.serialize import Apart
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.transfer import device
from monarch_kernel.runtime.transfer.errors import Gone, RDMAError, RDMATimeoutError, Unfit
from monarch_kernel.runtime.transfer.handle import Handle, Op, OwnerRequest
from monarch_kernel.runtime.transfer.memory import Layout, Memory, address_of, copy, memory_of, scratch, steps
from monarch_kernel.runtime.transfer.registration_table import PeerProcess, Registration
from monarch_kernel.runtime.transfer.thread_pool import SharedCopy, ThreadPool

if TYPE_CHECKING:
    from types import ModuleType

# The interface between the transfer engine and its backends.
#
# All backends have the same semantics: tests/transfer/test_conformance.py runs each of them.


class BackendContext(Protocol):
    """The part of its engine that a backend may use.

    Attributes:
        node: this process's node.
        work: threads for transfers that this process starts.
        serve: threads for requests of other processes.
    """

    node: Node
    work: ThreadPool
    serve: ThreadPool

    def held(self, key: int, what: object = "") -> AbstractContextManager[Registration]:
        """Hold a registration of this process for the context; ``what`` names the use in the error.

        Raises:
            RDMAError: the buffer was dropped.
        """
        ...

    def registration_around(self, layout: Layout) -> int:
        """Return the key of a registration that contains all of ``layout``; 0 if there is none."""
        ...

    def elsewhere(self, handle: Handle) -> str:
        """Return why this process cannot share memory with the buffer's owner; "" if it can."""
        ...

    def peer(self, handle: Handle) -> PeerProcess:
        """Return the owner's process, which is on this machine.

        Raises:
            Gone: the process has ended.
            OSError: the process cannot be accessed.
        """
        ...

    def dropped(self, op: Op) -> RDMAError:
        """Return the error of a transfer of a dropped buffer."""
        ...

    def ask(
        self, handle: Handle, message: Callable[[int], tuple[object, object]], what: str, deadline: float | None
    ) -> OwnerRequest:
        """Send the owner a message (header and body, for a call number).

        Return a future of the reply's body and buffer lengths.
        """
        ...

    def offer(self, handle: Handle, backend: str, request: bytes, deadline: float | None) -> bytes:
        """Make the owner's backend of that name prepare a buffer (``Backend.offer``). Blocks.

        Raises:
            Unfit: the owner's backend cannot prepare it; the message has the reason.
            RDMAError: the buffer was dropped, or its owner is dead.
            RDMATimeoutError: no answer before the deadline.
        """
        ...


class Backend(Protocol):
    """Moves bytes between this process and the owner of a buffer.

    Attributes:
        name: its name in ``RDMABuffer.backend`` and in the setting that forces a backend.
        inline: transfers of up to this many bytes run on the calling thread instead of on one of the engine's.
        devices: whether ``move`` accepts local memory of a GPU; otherwise the engine stages it through CPU memory.
    """

    name: str
    inline: int
    devices: bool

    @staticmethod
    def available() -> bool:
        """Return whether this process can use the backend at all."""
        ...

    def bars(self, handle: Handle) -> str:
        """Return why it cannot reach this buffer, in a few words; "" if it can.

        Called for each transfer: must be fast.
        """
        ...

    def move(self, op: Op, deadline: float | None) -> None:
        """Move the bytes, and return when they have arrived. Blocks, but lets other threads run.

        Args:
            deadline: on the clock of ``time.monotonic()``; checked between pieces of the transfer.

        Raises:
            Unfit: it cannot serve this pair of processes after all, and has not accessed any memory.
            Gone: the owner is dead.
            RDMAError: the buffer was dropped, or its memory is not mapped.
            RDMATimeoutError: the deadline has passed.
        """
        ...

    def offer(self, key: int, request: bytes, peer: str) -> bytes:
        """Prepare a buffer for a peer of this backend, at the owner.

        Runs on a thread of ``Engine.serve``: must be brief.

        Args:
            key: the registration that the peer is about to reach.
            request: what the peer's backend passed to ``Engine.offer``.
            peer: name of the requesting proc.

        Returns:
            What ``Engine.offer`` returns to the peer's backend.

        Raises:
            Unfit: the backend cannot serve the buffer; the message has the reason. The peer then uses the next best
                backend.
            RDMAError: the buffer was dropped.
        """
        ...

    def dropped(self, key: int) -> None:
        """Deny all peers access to a dropped registration of this process."""
        ...

    def peer_dead(self, proc: str) -> None:
        """End transfers with a proc that has died, and free its resources."""
        ...

    def close(self) -> None:
        """Free everything as the engine shuts down. Running transfers fail."""
        ...


class StatelessBackend:
    """Base of backends that keep no state and need no help from the owner's backend."""

    devices = False

    def offer(self, key: int, request: bytes, peer: str) -> bytes:
        raise NotImplementedError

    def dropped(self, key: int) -> None:
        """Do nothing: no state is kept."""

    def peer_dead(self, proc: str) -> None:
        """Do nothing: no state is kept."""

    def close(self) -> None:
        """Do nothing: no state is kept."""


# Access buffers of other processes of this host by cross-memory attach: the kernel copies without the owner's help.
#
# ``process_vm_readv`` and ``process_vm_writev`` need permission to trace the other process: the same user, and no
# sandbox or ``ptrace_scope`` that forbids it. If they are forbidden, the first attempt detects it, and the next
# backend is used.

#: Copies smaller than twice this are not shared. Larger ones are cut into pieces between this and PIECE_MAX: more
#: pieces than threads, because one thread may be slower, but few, because each ends with a wait for the GIL.
PIECE = 4 << 20
PIECE_MAX = 64 << 20
#: Runs shorter than this cost more to read one by one than to read together with the gaps between them (bytes).
SHORT = 256
SPAN_MAX = 256 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_writev = _libc.process_vm_writev
for _function in (_readv, _writev):
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
_FORBIDDEN = {errno.EPERM, errno.ENOSYS, errno.EACCES}
_BYTE = (ctypes.c_char * 1)()


def _call(function: Any, pid: int, here: array[int], there: array[int]) -> int:
    """Return the number of bytes moved, or the negative error number."""
    here_at, here_n = here.buffer_info()
    there_at, there_n = there.buffer_info()
    moved = function(pid, here_at, here_n // 2, there_at, there_n // 2, 0)
    return moved if moved >= 0 else -ctypes.get_errno()


def _probe(pid: int, address: int) -> int:
    """Try to read one byte of a process. Return the error number, 0 for success."""
    byte = (ctypes.c_char * 1)()
    moved = _call(_readv, pid, array("Q", (ctypes.addressof(byte), 1)), array("Q", (address, 1)))
    return max(-moved, 0)


class Cma(StatelessBackend):
    """Cross-memory attach."""

    name = "cma"
    inline = 1 << 20

    def __init__(self, engine: BackendContext) -> None:
        self._engine = engine

    @staticmethod
    def available() -> bool:
        return _probe(os.getpid(), ctypes.addressof(_BYTE)) not in _FORBIDDEN

    def bars(self, handle: Handle) -> str:
        elsewhere = "it is in GPU memory" if handle.device else self._engine.elsewhere(handle)
        if elsewhere:
            return elsewhere
        try:
            peer = self._engine.peer(handle)
        except Gone:
            return ""  # move() raises it
        except OSError as e:
            return f"its owner's process cannot be accessed ({os.strerror(e.errno or 0)})"
        if peer.barred is None:
            error = _probe(peer.pid, handle.address)
            peer.barred = _forbidden(error) if error in _FORBIDDEN else ""
        return peer.barred

    def move(self, op: Op, deadline: float | None) -> None:
        handle = op.handle
        peer = self._engine.peer(handle)
        if not peer.hold(handle.slot, handle.key):
            if not peer.alive():
                raise Gone
            raise self._engine.dropped(op)
        try:
            _Copy(peer, op, deadline, self._engine.work.run).run()
        finally:
            peer.release(handle.slot)


def _forbidden(error: int) -> str:
    return f"process_vm_readv is forbidden here ({os.strerror(error)})"


class _Copy:
    """One transfer."""

    def __init__(self, peer: PeerProcess, op: Op, deadline: float | None, spawn: Any) -> None:
        self._peer = peer
        self._op = op
        self._deadline = deadline
        self._spawn = spawn
        self._function = _writev if op.write else _readv

    def run(self) -> None:
        if not self._peer.alive():
            raise Gone
        op, mine, theirs = self._op, self._op.memory.layout, self._op.handle.layout
        whole = theirs.part(op.offset, op.offset + op.size)
        if not op.write and whole is not None and self._worth_spanning(whole):
            self._read_span(mine, whole)
        elif mine.contiguous or theirs.contiguous or (whole is not None and whole.contiguous):
            self._shared(mine, whole if whole is not None and whole.contiguous else None)
        else:
            self._through_scratch(mine)
        if not self._peer.alive():
            raise Gone

    def _shared(self, mine: Layout, whole: Layout | None) -> None:
        """Copy directly if one of the two sides is contiguous, with several threads if the transfer is large."""
        size, at = self._op.size, self._op.offset
        theirs = whole or self._op.handle.layout
        at = 0 if whole else at
        # The kernel copies page by page, slower than a memcpy, and far slower into a process than out of it; two
        # threads make up for that.
        threads = min(environment.RDMA_THREADS.get(), size // PIECE) if size >= 2 * PIECE else 1
        if threads < 2:
            self._move(mine, 0, theirs, at, size)
            return
        piece = min(max(-(-size // (2 * threads)), PIECE), PIECE_MAX)
        piece = -(-piece // 4096) * 4096
        cuts = [(lo, min(lo + piece, size)) for lo in range(0, size, piece)]
        share = SharedCopy(cuts, lambda lo, hi: self._move(mine, lo, theirs, at + lo, hi - lo))
        for _ in range(min(threads, len(cuts)) - 1):
            self._spawn(share.help)
        share.finish()

    def _through_scratch(self, mine: Layout) -> None:
        """Copy through contiguous memory if both sides are scattered."""
        theirs, offset = self._op.handle.layout, self._op.offset
        for lo, hi in steps(mine, 0, self._op.size):
            memory = scratch(hi - lo)
            between = Layout(ctypes.addressof(memory), (), hi - lo)
            if self._op.write:
                copy(between, 0, mine, lo, hi - lo)
            self._move(between, 0, theirs, offset + lo, hi - lo)
            if not self._op.write:
                copy(mine, lo, between, 0, hi - lo)

    def _worth_spanning(self, layout: Layout) -> bool:
        low, high = layout.span()
        return not layout.contiguous and layout.run < SHORT and high - low <= min(4 * layout.nbytes, SPAN_MAX)

    def _read_span(self, mine: Layout, whole: Layout) -> None:
        """Read everything between the first and the last byte, and copy the runs from there."""
        low, high = whole.span()
        memory = scratch(high - low)
        address = ctypes.addressof(memory)
        self._move(Layout(address, (), high - low), 0, Layout(low, (), high - low), 0, high - low)
        copy(mine, 0, Layout(whole.address - low + address, whole.dims, whole.run), 0, self._op.size)

    def _move(self, mine: Layout, mine_at: int, theirs: Layout, theirs_at: int, size: int) -> None:
        """Make system calls until all bytes are moved. One of the two layouts is contiguous."""
        done = 0
        while done < size:
            if mine.contiguous:
                there, some = theirs.block(theirs_at + done, theirs_at + size)
                here = array("Q", (mine.address + mine_at + done, some))
            else:
                here, some = mine.block(mine_at + done, mine_at + size)
                there = array("Q", (theirs.address + theirs_at + done, some))
            moved = _call(self._function, self._peer.pid, here, there)
            if moved <= 0:
                raise self._failed(-moved, theirs_at + done)
            done += moved
            if done < size:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    raise RDMATimeoutError(f"{self._op} did not end in time", self._op.handle.owner.id)
                if not self._peer.alive():
                    raise Gone

    def _failed(self, error: int, at: int) -> Exception:
        if error == errno.ESRCH or not self._peer.alive():
            return Gone()
        if error in _FORBIDDEN:
            self._peer.barred = _forbidden(error)
            return Unfit(self._peer.barred)
        reason = os.strerror(error) if error else "nothing could be moved"
        if error in (0, errno.EFAULT):
            reason = "the memory is no longer mapped, at the owner or here"
        return RDMAError(f"{self._op} failed near byte {at}: {reason}", self._op.handle.owner.id)


# Access GPU memory of other processes of this host: it is mapped here through CUDA IPC, and copied by the GPU.
#
# The owner describes the memory once per buffer and process; after that it takes no part. The mapping is PyTorch's, so
# it works for every allocator of PyTorch, and the owner's allocator keeps the memory until every mapping is closed.

#: The interval at which mapped buffers are checked for drops (seconds).
SWEEP = 5.0


class CudaIpc(StatelessBackend):
    """Mapped GPU memory."""

    name = "cuda_ipc"
    inline = -1  # it may have to query the owner
    devices = True

    def __init__(self, engine: BackendContext) -> None:
        self._engine = engine
        self._guard = threading.Lock()
        self._mapped: dict[int, tuple[Handle, Memory]] = {}
        self._barred: dict[str, str] = {}  # the reason, by owner
        self._sweeping = False
        self._offered = False  # whether another process has received a mapping description of this process's memory

    @staticmethod
    def available() -> bool:
        return find_spec("torch") is not None

    def bars(self, handle: Handle) -> str:
        if not handle.device:
            return "it is not GPU memory"
        elsewhere = self._engine.elsewhere(handle) or self._barred.get(handle.owner.id, "")
        if elsewhere:
            return elsewhere
        # A process with an open CUDA device has imported torch. For others the import is not worth its time.
        torch: ModuleType | None = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return "this process has not imported torch, or has no CUDA device"
        try:
            self._engine.peer(handle)
        except Gone:
            pass  # move() raises it
        except OSError as e:
            return f"its owner's process cannot be accessed ({os.strerror(e.errno or 0)})"
        return ""

    def move(self, op: Op, deadline: float | None) -> None:
        handle = op.handle
        peer = self._engine.peer(handle)
        if not peer.hold(handle.slot, handle.key):
            with self._guard:
                self._mapped.pop(handle.key, None)
            if not peer.alive():
                raise Gone
            raise self._engine.dropped(op)
        try:
            theirs = self._map(handle, deadline)
            if op.write:
                device.move(theirs, op.offset, op.memory, 0, op.size)
            else:
                device.move(op.memory, 0, theirs, op.offset, op.size)
        except RDMAError:
            raise
        except RuntimeError as e:  # CUDA's
            raise RDMAError(f"{op} failed: {e}", handle.owner.id) from None
        finally:
            peer.release(handle.slot)
        if not peer.alive():
            raise Gone

    def _map(self, handle: Handle, deadline: float | None) -> Memory:
        with self._guard:
            known = self._mapped.get(handle.key)
        if known is not None:
            return known[1]
        try:
            tensor = _rebuilt(self._engine.offer(handle, self.name, b"", deadline))
        except Unfit as e:
            self._barred[handle.owner.id] = str(e)
            raise
        memory = memory_of(tensor)
        with self._guard:
            self._mapped[handle.key] = handle, memory
            if not self._sweeping:
                self._sweeping = True
                self._engine.node.poller.call_later(SWEEP, self._sweep)
        return memory

    def _sweep(self) -> None:
        """Close the mappings of dropped buffers, which returns the memory to their owners."""
        with self._guard:
            for key, (handle, _) in list(self._mapped.items()):
                try:
                    peer = self._engine.peer(handle)
                    live = peer.hold(handle.slot, key)
                except (Gone, OSError):
                    live = False
                else:
                    if live:
                        peer.release(handle.slot)
                if not live:
                    del self._mapped[key]
            self._sweeping = bool(self._mapped)
            if not self._sweeping:
                return
        self._engine.node.poller.call_later(SWEEP, self._sweep)

    def offer(self, key: int, request: bytes, peer: str) -> bytes:
        with self._engine.held(key) as registration:
            if not registration.memory.device.startswith("cuda"):
                raise Unfit("it is not GPU memory")
            self._offered = True
            return _described(registration.memory.keep)

    def peer_dead(self, proc: str) -> None:
        with self._guard:
            for key in [key for key, (handle, _) in self._mapped.items() if handle.owner.id == proc]:
                del self._mapped[key]

    def close(self) -> None:
        with self._guard:
            self._mapped.clear()
        if self._offered:
            remove_torch_memory(os.getpid())


def _described(tensor: Any) -> bytes:
    """Describe the memory of a tensor so that another process can map it."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    try:
        _, arguments = reduce_tensor(tensor)
    except RuntimeError as e:
        raise Unfit(f"its memory cannot be shared with other processes ({e})") from None
    return pickle.dumps((str(torch.cuda.get_device_properties(tensor.device).uuid), arguments))


def _rebuilt(description: bytes) -> object:
    """Map the tensor of a description."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    uuid, arguments = pickle.loads(description)
    # The same device may have another number here.
    number = next(
        (i for i in range(torch.cuda.device_count()) if str(torch.cuda.get_device_properties(i).uuid) == uuid), None
    )
    if number is None:
        raise Unfit("the owner's GPU is not visible in this process")
    bound = inspect.signature(rebuild_cuda_tensor).bind(*arguments)
    bound.arguments["storage_device"] = number
    try:
        return rebuild_cuda_tensor(*bound.args)
    except RuntimeError as e:
        raise Unfit(f"the owner's GPU memory cannot be mapped here ({e})") from None


# Access buffers of other processes of this host through shared memory: the owner copies to or from a segment.
#
# This is not one-sided: the owner needs a running thread. It is used if cross-memory attach is forbidden.

#: The size of a message (bytes), and the number of messages in flight.
CHUNK = 8 << 20
WINDOW = 4


class Segment(StatelessBackend):
    """Messages whose bytes lie in shared segments."""

    name = "segment"
    inline = -1  # it waits for answers

    def __init__(self, engine: BackendContext) -> None:
        self._engine = engine

    @staticmethod
    def available() -> bool:
        return True

    def bars(self, handle: Handle) -> str:
        return self._engine.elsewhere(handle)

    def move(self, op: Op, deadline: float | None) -> None:
        pending: deque[tuple[int, int, Any]] = deque()
        try:
            self._move(op, deadline, pending)
        except ConnectionError as e:
            raise RDMAError(f"{op} failed: {e}", op.handle.owner.id) from None
        finally:
            for _, _, answer in pending:  # after a failure: wait, so that nothing continues in the background
                answer.exception()

    def _move(self, op: Op, deadline: float | None, pending: deque[tuple[int, int, Any]]) -> None:
        at = 0
        while at < op.size or pending:
            if at < op.size and len(pending) < WINDOW:
                size = min(CHUNK, op.size - at)
                pending.append((at, size, self._ask(op, at, size, deadline)))
                at += size
                continue
            start, size, answer = pending.popleft()
            body, buffers = answer.get()
            if not op.write:
                with memoryview(received(body, buffers)) as data:
                    copy(op.memory.layout, start, Layout(address_of(data), (), size), 0, size)
                del body, answer  # releases the segment

    def _ask(self, op: Op, at: int, size: int, deadline: float | None) -> object:
        key, offset = op.handle.key, op.offset + at
        if not op.write:
            return self._engine.ask(
                op.handle, lambda call: (BufferRead(call, key, offset, size), b""), str(op), deadline
            )

        def message(call: int) -> tuple[Any, Any]:
            node = self._engine.node
            body, segment = node.pack([bytes_of(op.memory, at, size), b""], (size,), [op.handle.owner.id])
            return BufferWrite(call, key, offset, (size,), segment), body

        return self._engine.ask(op.handle, message, str(op), deadline)


def received(body: Any, buffers: tuple[int, ...]) -> memoryview:
    """Return the bytes of a message with one buffer."""
    view = body.memory() if type(body) is Apart else memoryview(body)
    return view[: buffers[0]]


def bytes_of(memory: Memory, at: int, size: int) -> memoryview:
    """Return part of an object as contiguous bytes: a view if its memory is contiguous, otherwise a copy.

    The copy is valid until this thread makes the next one.
    """
    part = None if memory.device else memory.layout.part(at, at + size)
    if part is not None and part.contiguous:
        found: Any = (ctypes.c_char * size).from_address(part.address)
    else:
        found = device.staging(size) if memory.device else scratch(size)
        device.gather(memory, at, size, ctypes.addressof(found))
    return memoryview(found).cast("B")[:size]
