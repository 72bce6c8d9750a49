"""The owner's part: queue pairs that respond to peers' cards, and buffers registered for them."""

from __future__ import annotations

import threading
from typing import Any

from monarch_kernel.runtime.transfer.errors import RDMAError
from monarch_kernel.runtime.transfer.memory import Memory
from monarch_kernel.runtime.transfer.verbs.card import Card
from monarch_kernel.runtime.transfer.verbs.gpu import register
from monarch_kernel.runtime.transfer.verbs.messages import ConnectAnswer, ConnectRequest, QueuePairEnd
from monarch_kernel.runtime.transfer.verbs.ports import Gid


class Responder:
    """The queue pairs and regions that this process has set up for peers."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        #: peer -> (its card's port, number of its queue pair) -> the card and queue pair here
        self._pairs: dict[str, dict[tuple[str, int], tuple[Card, Any]]] = {}
        #: buffer -> card -> its region, and the offset of its addresses there
        self._regions: dict[int, dict[str, tuple[Card, Any, int]]] = {}
        self._dead: set[str] = set()

    def answer(
        self, key: int, memory: Memory, request: ConnectRequest, peer: str, path: tuple[Card, Gid, Gid]
    ) -> ConnectAnswer:
        """Register a buffer and connect a peer's queue pairs.

        Raises:
            Unfit: the card cannot do it.
            RDMAError: the peer is dead.
        """
        card, here, there = path
        region, shift = self._region(key, memory, card)
        asker = f"{request.port.device}:{request.port.number}"
        self._end(peer, [(asker, number) for number in request.gone])
        ends: list[QueuePairEnd] = []
        for theirs in request.ends:
            pair, mine = card.queue_pair()
            with self._guard:
                self._pairs.setdefault(peer, {})[asker, theirs.number] = card, pair
            card.connect(pair, mine, here, theirs, there, request.port, asks=False)
            ends.append(mine)
        if peer in self._dead:
            self.peer_dead(peer)
            raise RDMAError(f"{peer} is dead")
        return ConnectAnswer(card.port, here, there, tuple(ends), region.rkey, shift)

    def _region(self, key: int, memory: Memory, card: Card) -> tuple[Any, int]:
        with self._guard:
            known = self._regions.setdefault(key, {})
            if card.name not in known:
                known[card.name] = card, *register(card, memory, remote=True, writable=not memory.why_readonly)
            _, region, shift = known[card.name]
            return region, shift

    def _end(self, peer: str, which: list[tuple[str, int]]) -> None:
        with self._guard:
            pairs = self._pairs.get(peer, {})
            ended = [pairs.pop(number) for number in which if number in pairs]
        for card, pair in ended:
            card.end(pair)

    def dropped(self, key: int) -> None:
        """Let no peer's card reach the buffer any more: running transfers get an error."""
        with self._guard:
            regions = self._regions.pop(key, {})
        for card, region, _ in regions.values():
            card.end(region)

    def peer_dead(self, peer: str) -> None:
        """Close the queue pairs of a peer."""
        with self._guard:
            self._dead.add(peer)
            pairs = self._pairs.pop(peer, {})
        for card, pair in pairs.values():
            card.end(pair)
