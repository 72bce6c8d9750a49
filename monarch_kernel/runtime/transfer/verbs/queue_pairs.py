"""Queue pairs of the requester: a transfer is split into work requests, which several of them run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from monarch_kernel.runtime.transfer.memory import Layout
from monarch_kernel.runtime.transfer.verbs.card import Card, pyverbs

#: (address here, address there, length)
Work = tuple[int, int, int]

#: The maximum number of work requests posted at once. The last one reports completion.
BATCH = 16
#: The maximum number of bytes in flight on one queue pair.
WINDOW = 32 << 20
#: How long completions are polled without a pause, and the longest pause between two polls (seconds).
SPIN, PAUSE = 50e-6, 1e-3


class WorkFailure(Exception):
    """A work request failed, and its queue pair is no longer usable.

    Attributes:
        status: ``IBV_WC_*``.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class MemoryKeys:
    """The keys with which the local card addresses the local memory, and the owner's card the buffer."""

    lkey: int
    rkey: int
    here: int = 0  # offset to add to a local address
    there: int = 0  # offset to add to an address of the owner


class QueuePair:
    """A queue pair that starts transfers, used by one transfer at a time."""

    def __init__(self, card: Card) -> None:
        self.card = card
        v = pyverbs()
        self._v = v
        self._signaled, self._success = int(v.e.IBV_SEND_SIGNALED), int(v.e.IBV_WC_SUCCESS)
        self._flushed = int(v.e.IBV_WC_WR_FLUSH_ERR)
        self.queue = card.completion_queue()
        try:
            self.pair, self.end = card.queue_pair(self.queue)
        except BaseException:
            card.end(self.queue)
            raise
        self._posted = self._done = 0
        self._sent: list[tuple[int, int]] = []  # (number of a batch's last request, its bytes)
        self._bytes = 0

    @property
    def idle(self) -> bool:
        """Whether no work request is in flight."""
        return self._done == self._posted

    def close(self) -> None:
        """Close the queue pair. Work requests in flight end, and access no memory afterwards."""
        self.card.end(self.pair)
        self.card.end(self.queue)

    def staging(self) -> int:
        """Return how many work requests it can accept now."""
        return 0 if self._bytes >= WINDOW else self.card.depth - (self._posted - self._done)

    def post(self, works: list[Work], opcode: int, keys: MemoryKeys) -> None:
        """Post work requests to the card."""
        v = self._v
        self._posted += len(works)
        number, flags = self._posted, self._signaled
        after: Any = None
        made: list[Any] = []
        for here, there, length in reversed(works):
            piece = v.SGE(here + keys.here, length, keys.lkey)
            after = v.SendWR(number, opcode, 1, 0, [piece], flags, after)
            after.set_wr_rdma(keys.rkey, there + keys.there)
            made += piece, after
            flags = 0
        try:
            self.pair.post_send(after)
        except v.PyverbsError:
            raise WorkFailure(-1) from None
        finally:
            for thing in made:
                thing.close()  # they free nothing when they are collected
        size = sum(length for _, _, length in works)
        self._sent.append((number, size))
        self._bytes += size

    def poll(self) -> bool:
        """Return whether work requests have completed since the last call.

        Raises:
            Failed: a work request failed.
        """
        count, reports = self.queue.poll(BATCH)
        for report in reports:
            if report.status != self._success:
                raise WorkFailure(int(report.status))
            self._done = report.wr_id
        while self._sent and self._sent[0][0] <= self._done:
            self._bytes -= self._sent.pop(0)[1]
        return count > 0


def works(mine: Layout, at: int, theirs: Layout, there: int, size: int, most: int) -> Iterator[Work]:
    """Split a transfer into work requests of at most ``most`` bytes, each contiguous here and at the owner."""
    here, remote = mine.runs(at, at + size), theirs.runs(there, there + size)
    a = b = (0, 0)
    while size:
        if not a[1]:
            a = next(here)
        if not b[1]:
            b = next(remote)
        some = min(a[1], b[1], most)
        yield a[0], b[0], some
        a, b = (a[0] + some, a[1] - some), (b[0] + some, b[1] - some)
        size -= some


def drive(
    queue_pairs: list[tuple[QueuePair, MemoryKeys]], todo: Iterator[Work], write: bool, check: Callable[[], None]
) -> None:
    """Run all work requests, each on a queue pair with free capacity.

    Args:
        check: called repeatedly; it raises to end the transfer.

    Raises:
        Failed: a work request failed.
    """
    e = pyverbs().e
    opcode = int(e.IBV_WR_RDMA_WRITE if write else e.IBV_WR_RDMA_READ)
    more = True
    quiet = time.monotonic()
    while True:
        check()
        moved = False
        for queue_pair, keys in queue_pairs:
            if more and (staging := queue_pair.staging()):
                batch = _batch(todo, min(staging, BATCH))
                more = bool(batch)
                if batch:
                    queue_pair.post(batch, opcode, keys)
                    moved = True
            if not queue_pair.idle and queue_pair.poll():
                moved = True
        if not more and all(queue_pair.idle for queue_pair, _ in queue_pairs):
            return
        now = time.monotonic()
        if moved:
            quiet = now
        elif now - quiet > SPIN:
            # The pause is proportional to the wait so far: long waits cost little CPU time, and short ones stay short.
            time.sleep(min((now - quiet) / 4, PAUSE))


def _batch(todo: Iterator[Work], staging: int) -> list[Work]:
    """Return the next work requests: many small pieces, or one large piece."""
    batch: list[Work] = []
    size = 0
    for work in islice(todo, staging):
        batch.append(work)
        size += work[2]
        if size >= 1 << 18:
            break
    return batch
