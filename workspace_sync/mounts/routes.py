"""Decide which host gets a block from which: one from the client, the others from hosts that have it. No I/O, no clock.

Unlike in a sync, hosts ask: a host wants a block when a program reads it there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: How many hosts read from one holder of a block at a time.
READERS = 2
#: A host that has got no block for so long is not waited for by others (seconds).
SLOW = 2.0

#: Where the client itself is the source.
CLIENT = -1


@dataclass(slots=True)
class _Block:
    holders: dict[int, int] = field(default_factory=dict[int, int])  # host -> hosts that read from it now
    sent: float | None = None  # when the client last gave it to a host that has not got it yet
    to: set[int] = field(default_factory=set[int])  # the hosts that the client gives it to


class BlockRoutes:
    """Decides where hosts get blocks from.

    Blocks are named by any hashable value, hosts by their ranks.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._dead: set[int] = set()

    def ask(self, host: int, block: tuple[int, int], now: float, avoid: frozenset[int] = frozenset()) -> int | None:
        """Choose the source of a block for a host: another host, or ``CLIENT``; None: ask again after the next ``got``.

        Args:
            host: which asks.
            block: what it wants.
            now: the time (seconds).
            avoid: hosts from which it could not get it.
        """
        state = self._blocks.setdefault(block, _Block())
        holders = [h for h in state.holders if h != host and h not in self._dead and h not in avoid]
        free = [h for h in holders if state.holders[h] < READERS]
        if free:
            chosen = min(free, key=lambda h: (state.holders[h], h))
            state.holders[chosen] += 1
            return chosen
        if not holders and (state.sent is None or not state.to - self._dead or now - state.sent > SLOW):
            state.sent = now
            state.to.add(host)
            return CLIENT
        return None

    def got(self, host: int, block: tuple[int, int], source: int) -> None:
        """A host has a block, from another host or the client; it now serves it to others."""
        self._ended(host, block, source)
        self._blocks.setdefault(block, _Block()).holders.setdefault(host, 0)

    def failed(self, host: int, block: tuple[int, int], source: int) -> None:
        """A host could not get a block from another host or the client."""
        self._ended(host, block, source)

    def _ended(self, host: int, block: tuple[int, int], source: int) -> None:
        state = self._blocks.setdefault(block, _Block())
        if source == CLIENT:
            state.to.discard(host)
            if not state.to:
                state.sent = None
        elif state.holders.get(source, 0) > 0:
            state.holders[source] -= 1

    def forget(self, block: tuple[int, int]) -> None:
        """Forget the holders of a block whose content is incomplete: the next host gets it from the client."""
        self._blocks.pop(block, None)

    def dead(self, host: int) -> None:
        """A host has ended, or cannot be reached: it serves nothing any more."""
        self._dead.add(host)
