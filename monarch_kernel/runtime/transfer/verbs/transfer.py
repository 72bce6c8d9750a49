"""Run one transfer through RDMA cards: directly between the two memories, or staged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from monarch_kernel import environment
from monarch_kernel.runtime.transfer.device import gather, scatter
from monarch_kernel.runtime.transfer.errors import Gone, RDMAError, RDMATimeoutError, Unfit
from monarch_kernel.runtime.transfer.handle import Handle, Op
from monarch_kernel.runtime.transfer.memory import Layout, copy, steps
from monarch_kernel.runtime.transfer.verbs.card import Card, ConnectRequest, decode_answer, encode
from monarch_kernel.runtime.transfer.verbs.regions import (
    SMALL,
    STAGE,
    MemoryKeys,
    QueuePair,
    RegionCache,
    StagingBuffer,
    drive,
    works,
)

# The route from a card of this process to one owner: queue pairs, created on demand, and the keys of its buffers.

#: The maximum number of an owner's buffers that are remembered.
REMOTES = 1 << 16

#: (buffer, request, deadline) -> the owner's answer
Offer = Callable[[Handle, bytes, float | None], bytes]


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """The owner's card's address and key of a buffer."""

    rkey: int
    shift: int


class Route:
    """The queue pairs to one owner. Each is lent to one transfer at a time, so that a failure affects no other."""

    def __init__(self, card: Card, regions: RegionCache, offer: Offer, most: int) -> None:
        self.card = card
        self.regions = regions
        self.dead = False
        #: Whether the owner has ever connected a queue pair of this route, and whether a transfer over one succeeded.
        self.works = self.proven = False
        self._offer = offer
        self._most = most
        self._queue_pairs = 0  # all of them: lent, free or in creation
        self._free: list[QueuePair] = []
        self._gone: list[int] = []  # numbers of connected ones that were closed
        self._remotes: dict[int, RemoteRegion] = {}
        self._changed = threading.Condition()

    @contextmanager
    def lent(
        self, op: Op, wanted: int, deadline: float | None
    ) -> Generator[tuple[list[QueuePair], RemoteRegion], None, None]:
        """Lend between 1 and ``wanted`` queue pairs that reach the owner, with the buffer's region on the owner's card.

        Raises:
            Unfit, Gone, RDMAError, RDMATimeoutError: as for ``Backend.move``.
        """
        queue_pairs, remote = self._take(op, wanted, deadline)
        try:
            yield queue_pairs, remote
        finally:
            self._give(queue_pairs)

    def _take(self, op: Op, wanted: int, deadline: float | None) -> tuple[list[QueuePair], RemoteRegion]:
        while True:
            with self._changed:
                if self.dead:
                    raise Gone
                remote = self._remotes.get(op.handle.key)
                missing = max(0, min(wanted - len(self._free), self._most - self._queue_pairs))
                if remote is not None and not missing and self._free:
                    queue_pairs, self._free = self._free[:wanted], self._free[wanted:]
                    return queue_pairs, remote
                if remote is not None and not missing:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise RDMATimeoutError(f"{op} did not begin in time", op.handle.owner.id)
                    self._changed.wait(left)
                    continue
                self._queue_pairs += missing
            try:
                self.ask(op.handle, missing, deadline)
            except Unfit:
                with self._changed:
                    if remote is None or not self._queue_pairs:
                        raise
                    self._most = self._queue_pairs  # the limit is reached

    def ask(self, handle: Handle, count: int, deadline: float | None) -> None:
        """Request the owner to register a buffer and connect ``count`` new queue pairs, which are already counted."""
        made: list[QueuePair] = []
        kept = 0
        with self._changed:
            gone, self._gone = self._gone, []
        try:
            for _ in range(count):
                made.append(QueuePair(self.card))
            request = ConnectRequest(self.card.port, tuple(queue_pair.end for queue_pair in made), tuple(gone))
            answer = decode_answer(self._offer(handle, encode(request), deadline))
            gone = []
            for queue_pair, end in zip(made, answer.ends):
                self.card.connect(
                    queue_pair.pair, queue_pair.end, answer.there, end, answer.here, answer.port, asks=True
                )
                kept += 1
        finally:
            with self._changed:
                kept = 0 if self.dead else kept
                self._queue_pairs -= count - kept
                self._gone += gone
                self._free += made[:kept]
                self._gone += [queue_pair.end.number for queue_pair in made[kept:]]
                self._changed.notify_all()
            for queue_pair in made[kept:]:
                queue_pair.close()
        with self._changed:
            self.works = self.works or bool(kept)
            if len(self._remotes) >= REMOTES:
                self._remotes.clear()
            self._remotes[handle.key] = RemoteRegion(answer.rkey, answer.shift)

    def _give(self, queue_pairs: list[QueuePair]) -> None:
        broken = [queue_pair for queue_pair in queue_pairs if self.dead or not queue_pair.idle]
        for queue_pair in broken:
            queue_pair.close()
        with self._changed:
            self._queue_pairs -= len(broken)
            self._gone += [queue_pair.end.number for queue_pair in broken]
            self._free += [queue_pair for queue_pair in queue_pairs if queue_pair not in broken]
            self._changed.notify_all()
            dead = self.dead
        if dead:
            self.end()

    def ready(self, key: int) -> bool:
        """Return whether a transfer can start without a query to the owner."""
        return key in self._remotes and bool(self._free) and not self.dead

    def forget(self, key: int) -> None:
        """Forget a buffer, because the owner may have another key for it, or none."""
        with self._changed:
            self._remotes.pop(key, None)

    def end(self) -> None:
        """Close the queue pairs that are not lent. Lent ones are closed on return."""
        with self._changed:
            self.dead = True
            free, self._free = self._free, []
            self._queue_pairs -= len(free)
            self._changed.notify_all()
        for queue_pair in free:
            queue_pair.close()

    def wait_ended(self, seconds: float) -> bool:
        """Wait until all queue pairs are closed. Return False after ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue_pairs, seconds)


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
