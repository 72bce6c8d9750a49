"""Batches of transfers: ``RDMAAction``."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.transfer.buffer import RDMABuffer, atomic, check_word, reading, writing
from monarch_kernel.runtime.transfer.handle import Op
from monarch_kernel.runtime.transfer.memory import Layout
from monarch_kernel.runtime.transfer.service import transfer_service

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

    def read_remote(self, dst: Any, src: RDMABuffer, *, offset: int = 0, size: int | None = None) -> RDMAAction:
        """Read a buffer into local memory. The arguments are those of ``RDMABuffer.read_into``."""
        op = reading(_handle(src, "read_remote(dst, src)"), dst, offset, size)
        self._add(op, "read_remote")
        return self

    def write_remote(self, dst: RDMABuffer, src: Any, *, offset: int = 0) -> RDMAAction:
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


def _handle(buffer: Any, call: str) -> Any:
    if not isinstance(buffer, RDMABuffer):
        raise TypeError(f"{call} needs an RDMABuffer there, not {type(buffer).__name__}")
    return buffer._handle


def _all_of(poller: Poller, futures: list[Future[Any]], what: str) -> Future[list[Any]]:
    """Return a future of the results of all futures, done when all have ended.

    If any fails, it has the error of one.
    """
    whole: Future[list[Any]] = Future(poller, what)
    left = len(futures)
    guard = threading.Lock()

    def one(_future: Any) -> None:
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
