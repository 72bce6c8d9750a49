"""Choose the source of each block for each host: the client for one host, other hosts for the rest. No I/O, no clock.

Unlike in a sync, hosts request blocks: when a program on the host reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: The number of hosts that read from one holder of a block in parallel.
READERS = 2
#: The time after which other hosts stop waiting for a host to receive a block (seconds).
SLOW = 2.0

#: The client as the source.
CLIENT = -1


@dataclass(slots=True)
class _Block:
    holders: dict[int, int] = field(default_factory=dict[int, int])  # host -> number of hosts that read from it now
    sent: float | None = None  # when the client last sent it to a host that has not received it yet
    to: set[int] = field(default_factory=set[int])  # the hosts to which the client is sending it


class BlockRoutes:
    """Chooses the sources of blocks for hosts.

    A block is named by any hashable value, a host by its rank.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._dead: set[int] = set()

    def ask(self, host: int, block: tuple[int, int], now: float, avoid: frozenset[int] = frozenset()) -> int | None:
        """Choose the source of a block for a host: another host, or ``CLIENT``; None: ask again after the next ``got``.

        Args:
            host: the requesting host.
            block: the requested block.
            now: the time (seconds).
            avoid: hosts from which it could not read the block.
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
        """Record that a host has received a block, and now serves it to others."""
        self._ended(host, block, source)
        self._blocks.setdefault(block, _Block()).holders.setdefault(host, 0)

    def failed(self, host: int, block: tuple[int, int], source: int) -> None:
        """Record that a host could not read a block from another host or the client."""
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
        """Record that a host has ended or cannot be reached, and serves no blocks any more."""
        self._dead.add(host)
