"""The one quiet line below a cell that takes long: who is done, and where the others are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from monarch_kernel.meshes import format_ranks

#: A cell shows no progress before this many seconds.
QUIET = 1.0
#: Where ranks are is asked this often (seconds).
PERIOD = 1.0

_PLACES = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's main thread is, in the user's own code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return where if self.function in ("", "<module>") else f"{where} in {self.function}"


class Progress:
    """Which ranks of a cell are done, failed or still running, and when to say so.

    Args:
        ranks: the ranks that the cell runs on.
        now: the time of its start, on the clock of the later `now` arguments.
    """

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self.total = 0
        self.waiting: set[int] = set()
        #: Ranks that live, but do not answer anybody, and why.
        self.silent: dict[int, str] = {}
        self.failed: dict[int, str] = {}
        #: Ranks that still run something else, and what.
        self.queued: dict[int, str] = {}
        self._places: dict[int, Place] = {}
        self._started = now
        self._asked = now
        for rank in ranks:
            self.waiting.add(rank)
            self.total += 1

    def done(self, rank: int) -> None:
        """`rank` finished."""
        self.waiting.discard(rank)
        self.queued.pop(rank, None)
        self._places.pop(rank, None)

    def fail(self, rank: int, why: str) -> None:
        """`rank` failed; `why` is the exception in one line."""
        self.done(rank)
        self.failed[rank] = why

    def at(self, places: Mapping[int, Place | None]) -> None:
        """Where ranks were a moment ago; None for one that could not tell."""
        for rank, place in places.items():
            if place is None:
                self._places.pop(rank, None)
            elif rank in self.waiting:
                self.queued.pop(rank, None)
                self._places[rank] = place

    def behind(self, rank: int, what: str) -> None:
        """`rank` has not begun: it still runs `what`."""
        if rank in self.waiting:
            self.queued[rank] = what

    def standing(self) -> object:
        """What changes when the cell goes on: who is done, who has failed, and where the others are."""
        return frozenset(self.waiting), frozenset(self.failed), frozenset(self._places.items())

    def is_due(self, now: float) -> bool:
        """Whether it is time to ask where the ranks are."""
        if now - self._started < QUIET or now - self._asked < PERIOD or not self.waiting:
            return False
        self._asked = now
        return True

    def line(self, now: float) -> str:
        """The line to show, empty while there is nothing to say."""
        if now - self._started < QUIET or not self.waiting:
            return ""
        done = self.total - len(self.waiting) - len(self.failed)
        parts = [f"{done} of {self.total} ranks done"] if self.total > 1 else []
        alike: dict[str, list[int]] = {}
        for rank, why in self.failed.items():
            alike.setdefault(why, []).append(rank)
        parts += [f"{format_ranks(ranks, limit=6)} failed: {why}" for why, ranks in alike.items()]
        for what in dict.fromkeys(self.queued.values()):
            who = [rank for rank in self.queued if self.queued[rank] == what]
            all_of_them = len(who) == self.total
            parts.append(f"queued behind {what}" if all_of_them else f"{_listed(who)} queued behind {what}")
        if self.waiting - self.queued.keys():
            parts.append(self._waiting())
        silent = {rank: why for rank, why in self.silent.items() if rank in self.waiting}
        for why in dict.fromkeys(silent.values()):
            parts.append(f"{_listed(rank for rank in silent if silent[rank] == why)} does not respond: {why}")
        return " · ".join(parts)

    def _waiting(self) -> str:
        places: dict[Place, list[int]] = {}
        for rank, place in sorted(self._places.items()):
            places.setdefault(place, []).append(rank)
        begun = self.waiting - self.queued.keys()
        ranks = _listed(begun)
        if not places:
            return f"waiting for {ranks}"
        if len(places) == 1 and len(self._places) == len(begun):
            return f"waiting for {ranks} · {next(iter(places))}"
        said = [f"{_listed(who)} at {place}" for place, who in list(places.items())[:_PLACES]]
        rest = begun - {rank for who in list(places.values())[:_PLACES] for rank in who}
        if rest:
            said.append(f"{_listed(rest)} elsewhere" if said else _listed(rest))
        return f"waiting for {', '.join(said)}"


def _listed(ranks: Iterable[int]) -> str:
    return format_ranks(ranks, limit=6).replace(",", ", ")
