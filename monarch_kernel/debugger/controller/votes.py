"""Votes of ranks at a breakpoint: only the first rank stops, or all ranks stop if their values differ.

Pure: votes go in, decisions come out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

#: How many rounds of each breakpoint are kept, for ranks that arrive after the others.
MEMORY = 64


@dataclass(slots=True)
class _Round:
    """One pass of the ranks over a line."""

    values: dict[int, str] = field(default_factory=dict[int, str])
    waiting: set[int] = field(default_factory=set[int])
    agreed: str | None = None  # the value of all ranks that took part, if they continue
    stopped: bool = False


class Differs:
    """Stops all ranks at their n-th pass over a line, if they disagree there.

    The decision is made when all ranks have arrived, or when `decide` ends the wait; later ranks are compared with it.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, _Round] = {}

    def vote(self, rank: int, hit: int, value: str, voters: Collection[int]) -> dict[int, bool]:
        """Record that a rank has arrived for the `hit`-th time; `voters` are all ranks that may arrive.

        Returns:
            For each rank whose wait is over, whether it stops.
        """
        one = self._rounds.setdefault(hit, _Round())
        for old in sorted(self._rounds)[:-MEMORY]:
            del self._rounds[old]
        one.values[rank] = value
        if one.stopped:
            return {rank: True}
        if one.agreed is not None:
            return {rank: value != one.agreed}
        one.waiting.add(rank)
        return self.decide(hit) if set(voters) <= set(one.values) else {}

    def decide(self, hit: int) -> dict[int, bool]:
        """Decide a round by the votes so far."""
        one = self._rounds.get(hit)
        if one is None or not one.waiting:
            return {}
        one.stopped = len(set(one.values.values())) > 1
        if not one.stopped:
            one.agreed = next(iter(one.values.values()))
        decided = dict.fromkeys(sorted(one.waiting), one.stopped)
        one.waiting.clear()
        return decided


class First:
    """Stops the first rank that arrives, and no other until that rank has continued."""

    def __init__(self) -> None:
        self.holder: int | None = None

    def vote(self, rank: int) -> bool:
        """Whether this rank stops."""
        if self.holder is None:
            self.holder = rank
            return True
        return False

    def released(self, rank: int) -> None:
        """Release the vote, if that rank holds it: it has continued, or is dead."""
        if self.holder == rank:
            self.holder = None
