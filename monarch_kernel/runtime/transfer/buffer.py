"""Memory of one process that all other processes can read and write: ``RDMABuffer``."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.transfer import backend_settings
from monarch_kernel.runtime.transfer.errors import RDMAError
from monarch_kernel.runtime.transfer.handle import Handle, Op, decode_handle, encode_handle
from monarch_kernel.runtime.transfer.memory import Layout, memory_of
from monarch_kernel.runtime.transfer.service import backend_types, deadline_in, transfer_service


class RDMABuffer:
    """Registered memory: of a tensor (also on a CUDA device), an array, a ``bytearray`` or any other buffer.

    Registering copies nothing. The buffer object is a small handle. Send it to any process, which can then
    ``read_into`` its own memory and ``write_from`` it; the owner does nothing. The bytes are those of a copy of the
    object, row by row, whatever its strides. The owner's process keeps the object alive until ``drop()``.

    There is no lock: a read during a write may return a mix. After a failed transfer the target is undefined, unless
    the failure came before the start (every ``ValueError``, a dropped buffer, a dead owner).

    Raises:
        TypeError: the object has no memory.
        ValueError: the object is empty, on a device that is neither CPU nor CUDA, or holds Python objects.
    """

    __slots__ = ("_handle",)

    def __init__(self, data: object) -> None:
        memory = memory_of(data)
        if not memory.nbytes:
            raise ValueError("an empty buffer cannot be registered: it has no bytes to read or write")
        self._handle = transfer_service().register(memory)

    def size(self) -> int:
        """Its size in bytes."""
        return self._handle.size

    @property
    def owner(self) -> str:
        """The proc that owns the memory."""
        return self._handle.owner.id

    @property
    def backend(self) -> str:
        """The backend between the owner and this process; "none" if there is none. See ``configure`` for the names."""
        try:
            return next(transfer_service().candidates(self._handle)).name
        except RDMAError:
            return "none"

    def read_into(
        self, dst: object, *, offset: int = 0, size: int | None = None, timeout: float | None = 60
    ) -> Future[None]:
        """Copy bytes of the buffer into local memory.

        Args:
            dst: a tensor, array or writable buffer, at least as large as the read; bytes beyond that are unchanged.
            offset: the first byte of the buffer to read.
            size: the number of bytes; None for all from ``offset`` to the end.
            timeout: seconds until the future fails; None for no limit (a dead owner still ends the wait).

        Raises:
            ValueError: the range is not within the buffer, or ``dst`` is too small or cannot be written.
        """
        return transfer_service().transfer([reading(self._handle, dst, offset, size)], timeout)

    def write_from(self, src: object, *, offset: int = 0, timeout: float | None = 60) -> Future[None]:
        """Copy all of local memory into the buffer.

        Args:
            src: a tensor, array or buffer.
            offset: first byte of the buffer to write.
            timeout: seconds until the future fails; None for no limit (a dead owner still ends the wait).

        Raises:
            ValueError: the range is not within the buffer, or the buffer or ``src`` is unsuitable.
        """
        return transfer_service().transfer([writing(self._handle, src, offset)], timeout)

    def fetch_add(self, value: int, *, offset: int = 0, timeout: float | None = 60) -> Future[int]:
        """Add to an 8-byte word, and return its previous value.

        Atomic with respect to ``fetch_add`` and ``compare_and_swap`` of any process, but not to plain reads and writes.
        The owner's polling thread performs it, even while an endpoint runs there. Words wrap around at 64 bits, and are
        signed if the registered array or tensor is int64.
        """
        return atomic(self._handle, offset, value, None, timeout)

    def compare_and_swap(
        self, expected: int, value: int, *, offset: int = 0, timeout: float | None = 60
    ) -> Future[int]:
        """Set an 8-byte word to ``value`` if it equals ``expected``. Return its previous value, like ``fetch_add``."""
        return atomic(self._handle, offset, value, expected, timeout)

    def drop(self, *, timeout: float | None = 60) -> Future[None]:
        """End the registration, from any process. The future is done when no transfer accesses the memory any longer.

        Later transfers fail with ``RDMAError``. Dropping twice, or after the owner's death, is not an error.
        """
        return transfer_service().drop(self._handle, deadline_in(timeout))

    def __reduce__(self) -> Any:
        return _arrived, (encode_handle(self._handle),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RDMABuffer) and self._handle == other._handle

    def __hash__(self) -> int:
        return hash(self._handle.key)

    def __repr__(self) -> str:
        return f"<RDMABuffer of {self.size()} bytes of {self._handle.who}>"


def _arrived(data: bytes) -> RDMABuffer:
    buffer = RDMABuffer.__new__(RDMABuffer)
    buffer._handle = decode_handle(data)
    return buffer


def reading(handle: Handle, dst: object, offset: int, size: int | None) -> Op:
    """Check the arguments of a read, and return its operation."""
    memory = memory_of(dst)
    if size is None:
        size = handle.size - offset
    _check_range(handle, offset, size)
    if memory.why_readonly:
        raise ValueError(f"dst cannot be written: {memory.why_readonly}")
    if memory.nbytes < size:
        part = f", or size={memory.nbytes} to read less" if memory.nbytes else ""
        raise ValueError(
            f"dst has {memory.nbytes} bytes, and bytes {offset} to {offset + size} of the buffer are {size}: "
            f"give a larger dst{part}"
        )
    return Op(False, handle, offset, memory, size)


def writing(handle: Handle, src: object, offset: int) -> Op:
    """Check the arguments of a write, and return its operation."""
    memory = memory_of(src)
    _check_range(handle, offset, memory.nbytes)
    if handle.why_readonly:
        raise ValueError(f"the buffer of {handle.who} cannot be written: {handle.why_readonly}")
    return Op(True, handle, offset, memory, memory.nbytes)


def _check_range(handle: Handle, offset: int, size: int) -> None:
    if offset == handle.size:
        raise ValueError(f"there is nothing at byte {offset} of the buffer, which has {handle.size} bytes")
    if offset < 0 or offset + size > handle.size:
        raise ValueError(f"bytes {offset} to {offset + size} are not within the buffer, which has {handle.size} bytes")
    if size <= 0:
        raise ValueError("nothing to transfer: the size is 0" if not size else f"the size is negative: {size}")


def atomic(handle: Handle, offset: int, operand: int, expected: int | None, timeout: float | None) -> Future[int]:
    """Check the arguments of an atomic, and start it."""
    check_word(handle, offset, operand, expected)
    return _word(handle, transfer_service().atomic(handle, offset, operand & _MASK, _masked(expected), timeout))


def check_word(handle: Handle, offset: int, operand: int, expected: int | None) -> None:
    """Raise ValueError unless there is an aligned, writable word at the offset and the operands fit into it."""
    _check_range(handle, offset, 8)
    if handle.why_readonly:
        raise ValueError(f"the buffer of {handle.who} cannot be written: {handle.why_readonly}")
    part = handle.layout.part(offset, offset + 8)
    if part is None or not part.contiguous:
        raise ValueError(f"the 8 bytes from byte {offset} on are not in one piece")
    if part.address % 8:
        raise ValueError(f"the word at byte {offset} is not at a multiple of 8 in the owner's memory")
    for value in (operand, expected):
        if value is not None and not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"{value} does not fit into 8 bytes")


_MASK = (1 << 64) - 1


def _masked(value: int | None) -> int | None:
    return None if value is None else value & _MASK


def _word(handle: Handle, future: Future[int]) -> Future[int]:
    return future.then(lambda word: word - (word >> 63 << 64)) if handle.signed else future


def get_rdma_backend() -> str:
    """Return the backend between hosts: "ibverbs", "tcp" or "none"; or the forced one, if it is available.

    Within a host there are faster backends; ``RDMABuffer.backend`` names the one for a buffer.
    """
    only = backend_settings.forced()
    names = {backend.name for backend in backend_types() if backend.available()}
    if only is None and backend_settings.tcp_fallback() is False:
        names.discard("tcp")
    for name in ("ibverbs", "tcp") if only is None else (only,):
        if name in names:
            return name
    return "none"


def is_rdma_available() -> bool:
    """Return whether a buffer can be reached from another host: ``get_rdma_backend`` is not "none"."""
    return get_rdma_backend() != "none"


def is_ibverbs_available() -> bool:
    """Return whether transfers can use an RDMA device of this host."""
    return any(backend.name == "ibverbs" and backend.available() for backend in backend_types())


# Batches of transfers: ``RDMAAction``.

#: Layouts with more runs are compared only by the addresses they span.
EXACT = 1 << 20


@dataclass(slots=True)
class _Use:
    """Memory that one operation reads or writes, to find overlaps between operations."""

    what: str
    space: tuple[str, int]  # the process that owns the memory: name and pid
    layout: Layout
    kind: str  # "read", "write" or "atomic"
    size: int
    offset: int = 0
    _starts: list[tuple[int, int]] | None = field(default=None)

    def span(self) -> tuple[int, int]:
        """Return its lowest address, and the first address after its highest."""
        part = self.layout.part(self.offset, self.offset + self.size)
        return (part or self.layout).span()

    def exact(self) -> list[tuple[int, int]]:
        """Return the (first, last) addresses of its runs, in order."""
        if self._starts is None:
            runs = self.layout.runs(self.offset, self.offset + self.size)
            self._starts = sorted((address, address + length - 1) for address, length in runs)
        return self._starts

    def conflicts(self, other: _Use) -> bool:
        """Return whether the result depends on the order of the two operations."""
        if self.space != other.space or (self.kind == other.kind and self.kind != "write"):
            return False
        (low, high), (other_low, other_high) = self.span(), other.span()
        if low >= other_high or other_low >= high:
            return False
        if self.layout.contiguous and other.layout.contiguous:
            return True
        if max(self.size // self.layout.run, other.size // other.layout.run) > EXACT:
            return True
        mine, theirs = self.exact(), other.exact()
        for first, last in mine:
            at = bisect_left(theirs, (first, first))
            if (at < len(theirs) and theirs[at][0] <= last) or (at and theirs[at - 1][1] >= first):
                return True
        return False


class RDMAAction:
    """A batch of transfers that ``submit`` runs together, in no particular order. It may be submitted repeatedly.

    Example::

        action = RDMAAction().read_remote(weights, weights_buffer).write_remote(gradients_buffer, gradients)
        action.submit().get()

    Because operations have no order, two of them may touch the same memory, here or at the owner, only if both just
    read it or both are atomics. Adding an operation that breaks this rule raises ``ValueError``.
    """

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._atomics: list[tuple[RDMABuffer, int, int, int | None]] = []
        self._uses: list[_Use] = []
        self._count = 0

    def read_remote(self, dst: object, src: RDMABuffer, *, offset: int = 0, size: int | None = None) -> RDMAAction:
        """Read a buffer into local memory. The arguments are those of ``RDMABuffer.read_into``."""
        op = reading(_handle(src, "read_remote(dst, src)"), dst, offset, size)
        self._add(op, "read_remote")
        return self

    def write_remote(self, dst: RDMABuffer, src: object, *, offset: int = 0) -> RDMAAction:
        """Write local memory into a buffer. The arguments are those of ``RDMABuffer.write_from``."""
        op = writing(_handle(dst, "write_remote(dst, src)"), src, offset)
        self._add(op, "write_remote")
        return self

    def fetch_add(self, buffer: RDMABuffer, value: int, *, offset: int = 0) -> RDMAAction:
        """Add to a word of a buffer; see ``RDMABuffer.fetch_add``."""
        return self._add_atomic(buffer, offset, value, None, "fetch_add")

    def compare_and_swap(self, buffer: RDMABuffer, expected: int, value: int, *, offset: int = 0) -> RDMAAction:
        """Change a word of a buffer; see ``RDMABuffer.compare_and_swap``."""
        return self._add_atomic(buffer, offset, value, expected, "compare_and_swap")

    def submit(self, timeout: float | None = 60) -> Future[list[int] | None]:
        """Start all operations.

        Returns:
            A future that is done when every operation has ended. Its value lists the previous values of the atomics'
            words, in the order in which the atomics were added; it is None without atomics. If operations fail, the
            future raises one of their errors.
        """
        core = transfer_service()
        futures: list[Future[Any]] = []
        if self._ops:
            futures.append(core.transfer(self._ops, timeout))
        for buffer, offset, value, expected in self._atomics:
            futures.append(atomic(buffer._handle, offset, value, expected, timeout))
        words = len(self._atomics)
        whole = _all_of(core.node.poller, futures, f"an RDMAAction of {self._count} operations")
        return whole.then(lambda results: results[-words:] if words else None)

    def _add(self, op: Op, verb: str) -> None:
        handle, mine = op.handle, op.memory.layout
        number = self._count + 1
        here = transfer_service()
        there = _Use(
            f"the buffer of operation {number} ({verb})",
            (handle.owner.id, handle.pid),
            handle.layout,
            "write" if op.write else "read",
            op.size,
            op.offset,
        )
        local = _Use(
            f"the local memory of operation {number} ({verb})",
            (here.node.id, here.pid),
            mine,
            "read" if op.write else "write",
            op.size,
        )
        self._check([there, local])
        self._ops.append(op)

    def _add_atomic(self, buffer: RDMABuffer, offset: int, value: int, expected: int | None, verb: str) -> RDMAAction:
        handle = _handle(buffer, f"{verb}(buffer, ...)")
        check_word(handle, offset, value, expected)
        what = f"the word of operation {self._count + 1} ({verb})"
        self._check([_Use(what, (handle.owner.id, handle.pid), handle.layout, "atomic", 8, offset)])
        self._atomics.append((buffer, offset, value, expected))
        return self

    def _check(self, uses: list[_Use]) -> None:
        for index, new in enumerate(uses):
            for old in [*self._uses, *uses[:index]]:
                if new.conflicts(old):
                    raise ValueError(
                        f"{new.what} and {old.what} overlap, and at least one of them is written: operations of one "
                        "action have no order, so put them into two actions"
                    )
        self._uses += uses
        self._count += 1


def _handle(buffer: object, call: str) -> Handle:
    if not isinstance(buffer, RDMABuffer):
        raise TypeError(f"{call} needs an RDMABuffer there, not {type(buffer).__name__}")
    return buffer._handle


def _all_of(poller: Poller, futures: list[Future[object]], what: str) -> Future[list[Any]]:
    """Return a future of the results of all futures, done when all have ended.

    If any fails, it has the error of one.
    """
    whole: Future[list[object]] = Future(poller, what)
    left = len(futures)
    guard = threading.Lock()

    def one(_future: object) -> None:
        nonlocal left
        with guard:
            left -= 1
            if left:
                return
        error = next((e for f in futures if (e := f.exception()) is not None), None)
        if error is not None:
            whole._reject(error)
        else:
            whole._resolve([f.get() for f in futures])

    for future in futures:
        future.add_done_callback(one)
    if not futures:
        whole._resolve([])
    return whole
