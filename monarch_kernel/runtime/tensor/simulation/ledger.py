"""`Ledger`: what simulated ranks have computed, what they keep, and what they have sent. No tensors, no processes.

Ranks that belong to the same meshes do the same: they are one `RankClass`, and 4,096 of them cost as much as one. A
class is split when a mesh appears that has only a part of its ranks.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

Line = tuple[str, int, str]


class SimulatedEvent(NamedTuple):
    """An operation of a class of ranks.

    Attributes:
        name: of the operation, with the words of `set_meta`.
        stream: in which it ran.
        start, duration: in seconds.
        line: of the program.
        size: bytes that it has sent, or of its results.
        communicates: whether ranks met, or sent something.
    """

    name: str
    stream: str
    start: float
    duration: float
    line: Line
    size: int
    communicates: bool


class MemoryLevel(NamedTuple):
    """What a rank keeps from a time on (seconds, bytes)."""

    time: float
    size: int


@dataclass
class RankClass:
    """Ranks that do the same.

    Attributes:
        ranks: which.
        clocks: when each stream has done its last operation (seconds).
        current, peak: bytes that a rank keeps, and the most that it has kept.
        peak_line: the line of the program that has made it the most.
        operations, flops: of a rank.
        sent: bytes that a rank has sent, by kind of exchange.
        busy, communicating: seconds in operations on the rank, and in exchanges.
        events, levels: in order of time.
    """

    ranks: frozenset[int]
    clocks: dict[str, float] = field(default_factory=dict[str, float])
    current: int = 0
    peak: int = 0
    peak_line: Line = ("?", 0, "?")
    operations: int = 0
    flops: int = 0
    sent: Counter[str] = field(default_factory=Counter[str])
    busy: float = 0.0
    communicating: float = 0.0
    events: list[SimulatedEvent] = field(default_factory=list[SimulatedEvent])
    levels: list[MemoryLevel] = field(default_factory=list[MemoryLevel])

    @property
    def time(self) -> float:
        """When all its streams have done their last operation."""
        return max(self.clocks.values(), default=0.0)

    def part(self, ranks: frozenset[int]) -> RankClass:
        """The same for some of the ranks."""
        made = copy.copy(self)
        made.ranks = ranks
        made.clocks, made.sent = dict(self.clocks), Counter(self.sent)
        made.events, made.levels = list(self.events), list(self.levels)
        return made


class Ledger:
    """The classes of all ranks, and the storages that they keep.

    Attributes:
        classes: of all ranks.
        lines: for each line of the program, how often it has issued an operation and what a rank has sent for it.
    """

    def __init__(self, ranks: int) -> None:
        self.classes = [RankClass(frozenset(range(ranks)))]
        self.lines: dict[Line, Counter[str]] = {}
        self._of: dict[frozenset[int], list[RankClass]] = {}
        #: Storages: their size, where they are, and how many values refer to them.
        self._storages: dict[int, tuple[int, frozenset[int], int]] = {}

    def of(self, ranks: frozenset[int]) -> list[RankClass]:
        """The classes of which some ranks are made up."""
        found = self._of.get(ranks)
        if found is None:
            for each in list(self.classes):
                inside = each.ranks & ranks
                if inside and inside != each.ranks:
                    self.classes.remove(each)
                    self.classes += [each.part(inside), each.part(each.ranks - inside)]
                    self._of.clear()
            found = self._of[ranks] = [each for each in self.classes if each.ranks <= ranks]
        return found

    def run(
        self, ranks: frozenset[int], stream: str, name: str, line: Line, seconds: float, flops: int, size: int
    ) -> None:
        """An operation on each rank by itself."""
        self._count(line, "operations", 1)
        for each in self.of(ranks):
            start = each.clocks.get(stream, 0.0)
            each.clocks[stream] = start + seconds
            each.operations += 1
            each.flops += flops
            each.busy += seconds
            each.events.append(SimulatedEvent(name, stream, start, seconds, line, size, False))

    def exchange(
        self,
        ranks: frozenset[int],
        stream: str,
        kind: str,
        name: str,
        line: Line,
        seconds: float,
        sent: float,
        senders: frozenset[int] | None = None,
    ) -> None:
        """An operation in which ranks meet: it begins when the last of them has come to it.

        Args:
            sent: bytes that each sender sends.
            senders: who sends; None: all of them.
        """
        if senders is not None:
            self.of(senders)  # so that each class sends, or does not
        met = self.of(ranks)
        start = max((each.clocks.get(stream, 0.0) for each in met), default=0.0)
        self._count(line, "operations", 1)
        self._count(line, "sent", round(sent))
        for each in met:
            sends = senders is None or each.ranks <= senders
            each.clocks[stream] = start + seconds
            each.operations += 1
            each.communicating += seconds
            if sends and sent:
                each.sent[kind] += round(sent)
            event = SimulatedEvent(name, stream, start, seconds, line, round(sent) if sends else 0, True)
            each.events.append(event)

    def wait(self, ranks: frozenset[int], stream: str, other: str) -> None:
        """A stream goes on when another one of the same ranks has come to where it is now."""
        for each in self.of(ranks):
            each.clocks[stream] = max(each.clocks.get(stream, 0.0), each.clocks.get(other, 0.0))

    # -- memory -------------------------------------------------------------------------------------

    def keep(self, storage: int, size: int, ranks: frozenset[int], line: Line) -> None:
        """Ranks keep a new storage, to which one value refers."""
        self._storages[storage] = (size, ranks, 1)
        self._change(ranks, size, line)

    def refer(self, storage: int) -> None:
        """One more value refers to a storage."""
        size, ranks, count = self._storages[storage]
        self._storages[storage] = (size, ranks, count + 1)

    def drop(self, storage: int) -> None:
        """One value less refers to a storage; without any, it goes."""
        size, ranks, count = self._storages[storage]
        if count > 1:
            self._storages[storage] = (size, ranks, count - 1)
            return
        del self._storages[storage]
        self._change(ranks, -size, ("?", 0, "?"))

    def _change(self, ranks: frozenset[int], size: int, line: Line) -> None:
        if not size:
            return
        for each in self.of(ranks):
            each.current += size
            each.levels.append(MemoryLevel(each.time, each.current))
            if each.current > each.peak:
                each.peak, each.peak_line = each.current, line

    # -- iterations ---------------------------------------------------------------------------------

    def begin_again(self) -> None:
        """Count operations, exchanges and peaks anew; what ranks keep stays."""
        self.lines.clear()
        for each in self.classes:
            each.peak, each.operations, each.flops = each.current, 0, 0
            each.busy = each.communicating = 0.0
            each.sent.clear()
            each.events.clear()
            each.levels.clear()
            each.clocks = dict.fromkeys(each.clocks, 0.0)

    def _count(self, line: Line, what: str, count: int) -> None:
        self.lines.setdefault(line, Counter())[what] += count
