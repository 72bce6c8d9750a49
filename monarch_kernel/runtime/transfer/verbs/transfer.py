"""Run one transfer through RDMA cards: directly between the two memories, or staged."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from monarch_kernel import environment
from monarch_kernel.runtime.transfer.device import gather, scatter
from monarch_kernel.runtime.transfer.errors import Gone, RDMAError, RDMATimeoutError, Unfit
from monarch_kernel.runtime.transfer.handle import Op
from monarch_kernel.runtime.transfer.memory import Layout
from monarch_kernel.runtime.transfer.memory_copy import copy, steps
from monarch_kernel.runtime.transfer.verbs.queue_pairs import MemoryKeys, QueuePair, drive, works
from monarch_kernel.runtime.transfer.verbs.regions import SMALL, STAGE, StagingBuffer
from monarch_kernel.runtime.transfer.verbs.route import Route

#: The size of a transfer per queue pair (bytes). One work request moves between this and PIECE_MAX.
PIECE = 1 << 20
PIECE_MAX = 8 << 20
#: Shorter pieces of scattered local memory are gathered by a copy, longer ones by the card (bytes).
SHORT = 16 << 10
#: A work request costs about as much as this many bytes on the wire, so shorter gaps of scattered remote memory are
#: read as well; SPAN_MAX limits such a read.
GAP = 16 << 10
SPAN_MAX = 256 << 20


class Transfer:
    """One operation.

    Args:
        routes: the routes to its owner, one for each participating card.
        closing: whether the backend is shutting down.
        buffer: returns the registration of this process that memory lies in; 0 for none.
    """

    def __init__(
        self,
        op: Op,
        deadline: float | None,
        routes: list[Route],
        closing: Callable[[], bool],
        buffer: Callable[[Layout], int],
    ) -> None:
        self._op = op
        self._deadline = deadline
        self._routes = routes
        self._closing = closing
        self._buffer = buffer
        self._theirs = op.handle.layout

    def run(self) -> None:
        """Run the transfer.

        Raises:
            Failed, Unfit, Gone, RDMAError, RDMATimeoutError: see ``Backend.move`` and ``WorkFailure``.
        """
        op, mine = self._op, self._op.memory.layout
        if op.memory.ready is not None:
            op.memory.ready.synchronize()  # work that the GPU had queued when the transfer was requested
        whole = self._theirs.part(op.offset, op.offset + op.size)
        if not op.write and not op.memory.device and whole is not None and _worth_spanning(whole):
            self._read_span(whole)
        elif op.size <= SMALL or (not mine.contiguous and mine.run < SHORT) or not self._directly():
            self._in_between()

    def _directly(self) -> bool:
        """Transfer directly between the two memories.

        Return False without a transfer if the local one cannot be registered.
        """
        op = self._op
        most = -(-op.size // PIECE)
        routes = self._routes[:most]
        each = max(1, min(environment.RDMA_QUEUE_PAIRS.get(), most) // len(routes)) if most > 1 else 1
        buffer = self._buffer(op.memory.layout)
        with ExitStack() as stack:
            try:
                # Entered first, so released last: no queue pair may be in use while its memory is not registered.
                regions = [stack.enter_context(r.regions.lent(op.memory, not op.write, buffer)) for r in routes]
            except Unfit:
                return False
            queue_pairs: list[tuple[QueuePair, MemoryKeys]] = []
            for route, region in zip(routes, regions):
                taken, remote = stack.enter_context(route.lent(op, each, self._deadline))
                keys = MemoryKeys(region.lkey, remote.rkey, region.shift, remote.shift)
                queue_pairs += [(queue_pair, keys) for queue_pair in taken]
            self._drive(queue_pairs, op.memory.layout, 0, op.offset, op.size)
        return True

    def _in_between(self) -> None:
        """Transfer piece by piece through contiguous memory that is already registered."""
        op, mine = self._op, self._op.memory
        cuts = [(0, op.size)] if op.size <= STAGE else _cuts(mine.layout, op.size)
        route = self._routes[0]
        with ExitStack() as stack:
            staging = stack.enter_context(route.regions.staging(max(hi - lo for lo, hi in cuts)))
            queue_pairs = self._queue_pairs(stack, route, staging, op.size)
            for lo, hi in cuts:
                between = staging.layout(hi - lo)
                if op.write:
                    gather(mine, lo, hi - lo, staging.address)
                self._drive(queue_pairs, between, 0, op.offset + lo, hi - lo)
                if not op.write:
                    scatter(mine, lo, hi - lo, staging.address)

    def _read_span(self, whole: Layout) -> None:
        """Read everything between the first and the last byte, then copy the runs from there."""
        low, high = whole.span()
        self._theirs = Layout(low, (), high - low)
        route = self._routes[0]
        with ExitStack() as stack:
            staging = stack.enter_context(route.regions.staging(high - low))
            queue_pairs = self._queue_pairs(stack, route, staging, high - low)
            self._drive(queue_pairs, staging.layout(high - low), 0, 0, high - low)
            picked = Layout(whole.address - low + staging.address, whole.dims, whole.run)
            copy(self._op.memory.layout, 0, picked, 0, self._op.size)

    def _queue_pairs(
        self, stack: ExitStack, route: Route, staging: StagingBuffer, size: int
    ) -> list[tuple[QueuePair, MemoryKeys]]:
        wanted = min(environment.RDMA_QUEUE_PAIRS.get(), size // PIECE) if size >= 2 * PIECE else 1
        taken, remote = stack.enter_context(route.lent(self._op, wanted, self._deadline))
        keys = MemoryKeys(staging.lkey, remote.rkey, 0, remote.shift)
        return [(queue_pair, keys) for queue_pair in taken]

    def _drive(
        self, queue_pairs: list[tuple[QueuePair, MemoryKeys]], mine: Layout, at: int, there: int, size: int
    ) -> None:
        piece = min(max(size // (4 * len(queue_pairs)), PIECE), PIECE_MAX)
        piece = min(piece, *(queue_pair.card.largest for queue_pair, _ in queue_pairs))
        drive(queue_pairs, works(mine, at, self._theirs, there, size, piece), self._op.write, self._check)
        for route in self._routes:
            route.proven = True

    def _check(self) -> None:
        owner = self._op.handle.owner.id
        if any(route.dead for route in self._routes):
            raise Gone
        if self._closing():
            raise RDMAError(f"{self._op} failed: this process is shutting its runtime down", owner)
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise RDMATimeoutError(f"{self._op} did not end in time", owner)


def _cuts(layout: Layout, size: int) -> list[tuple[int, int]]:
    """Return pieces that a copy gathers fast; for contiguous memory, any pieces."""
    if layout.contiguous:
        return [(lo, min(lo + STAGE, size)) for lo in range(0, size, STAGE)]
    return steps(layout, 0, size)


def _worth_spanning(layout: Layout) -> bool:
    if layout.contiguous:
        return False
    low, high = layout.span()
    return high - low <= SPAN_MAX and high - low - layout.nbytes <= GAP * (layout.nbytes // layout.run)
