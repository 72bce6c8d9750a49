"""The route from a card of this process to one owner: queue pairs, created on demand, and the keys of its buffers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from monarch_kernel.runtime.transfer.errors import Gone, RDMATimeoutError, Unfit
from monarch_kernel.runtime.transfer.handle import Handle, Op
from monarch_kernel.runtime.transfer.verbs.card import Card
from monarch_kernel.runtime.transfer.verbs.messages import ConnectRequest, decode_answer, encode
from monarch_kernel.runtime.transfer.verbs.queue_pairs import QueuePair
from monarch_kernel.runtime.transfer.verbs.regions import RegionCache

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
