"""Record the computation, memory and communication of simulated ranks, without tensors and processes: `Ledger`.

Ranks of the same meshes behave the same. They form one `RankClass`, and 4,096 of them cost as much as one. A class is
split when a mesh appears that has only some of its ranks.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from monarch_kernel.runtime.tensor.wire import Reduction

# The speed of ranks for the time estimates of a simulation: `SimulatedRates`.


@dataclass(frozen=True, slots=True)
class SimulatedRates:
    """Rates of one rank. The defaults are approximate data sheet values (H100, NVLink, 400 Gbit/s). Set measured ones.

    Attributes:
        flops: floating-point operations per second, of matrix products, convolutions and attention.
        memory: bytes per second that an operation reads and writes.
        link: bytes per second that a rank sends within its host; `network`: to other hosts.
        launch: the minimum duration of an operation (seconds).
        latency: the minimum duration of each step of a collective (seconds).
    """

    flops: float = 400e12
    memory: float = 3e12
    link: float = 300e9
    network: float = 40e9
    launch: float = 5e-6
    latency: float = 10e-6

    def operation(self, flops: int, moved: int) -> float:
        """Return the duration of an operation on one rank (seconds).

        Args:
            moved: the bytes that it reads and writes.
        """
        return max(self.launch, flops / self.flops, moved / self.memory)

    def transfer(self, sent: float, steps: int, within_host: bool) -> float:
        """Return the duration of an exchange in which a rank sends this many bytes in this many steps (seconds)."""
        return self.latency * steps + sent / (self.link if within_host else self.network)


def sent_in(how: Reduction, size: int) -> tuple[str, float, int]:
    """Return the data that a rank sends in a collective over `size` bytes: the bytes of a ring, in the steps of a tree.

    Returns:
        The usual name of the collective, the bytes that each rank sends, and the number of steps.
    """
    count = len(how.groups[0])
    if count == 1:
        return "nothing", 0.0, 0
    others, steps = count - 1, (count - 1).bit_length()
    if how.kind == "stack":
        if how.scatter:
            return "all-to-all", size * others / count, steps
        return ("gather", float(size), steps) if how.roots is not None else ("all-gather", float(size * others), steps)
    if how.scatter:
        return "reduce-scatter", size * others / count, steps
    if how.roots is not None:
        return "reduce", float(size), steps
    return "all-reduce", 2 * size * others / count, 2 * steps


Line = tuple[str, int, str]


class SimulatedEvent(NamedTuple):
    """An operation of a class of ranks.

    Attributes:
        name: the name of the operation, with the words of `set_meta`.
        stream: the stream of the operation.
        start, duration: its start and duration (seconds).
        line: the line of the program.
        size: the bytes that it sent, or the bytes of its results.
        communicates: whether ranks communicated.
    """

    name: str
    stream: str
    start: float
    duration: float
    line: Line
    size: int
    communicates: bool


class MemoryLevel(NamedTuple):
    """The memory of a rank (bytes) from a point in time (seconds)."""

    time: float
    size: int


@dataclass
class RankClass:
    """Ranks that behave the same.

    Attributes:
        ranks: the ranks.
        clocks: the end of each stream's last operation (seconds).
        current, peak: the current and peak memory of a rank (bytes).
        peak_line: the line of the program that caused the peak.
        operations, flops: the numbers of operations and floating-point operations of a rank.
        sent: the bytes that a rank has sent, by kind of exchange.
        busy, communicating: the time of operations on the rank, and of exchanges (seconds).
        events, levels: in chronological order.
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
        """The end of the last operation of all its streams (seconds)."""
        return max(self.clocks.values(), default=0.0)

    def part(self, ranks: frozenset[int]) -> RankClass:
        """Copy the class for some of its ranks."""
        made = copy.copy(self)
        made.ranks = ranks
        made.clocks, made.sent = dict(self.clocks), Counter(self.sent)
        made.events, made.levels = list(self.events), list(self.levels)
        return made


class Ledger:
    """The classes of all ranks, and the storages that they keep.

    Attributes:
        classes: the classes of all ranks.
        lines: for each line of the program, how many operations it issued and how many bytes a rank sent for it.
    """

    def __init__(self, ranks: int) -> None:
        self.classes = [RankClass(frozenset(range(ranks)))]
        self.lines: dict[Line, Counter[str]] = {}
        self._of: dict[frozenset[int], list[RankClass]] = {}
        #: Storages: size, ranks, and the number of values that refer to them.
        self._storages: dict[int, tuple[int, frozenset[int], int]] = {}

    def of(self, ranks: frozenset[int]) -> list[RankClass]:
        """Return the classes that make up these ranks. Classes are split if necessary."""
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
        """Record an operation that each rank runs independently."""
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
        """Record an exchange between ranks. It begins when the last rank has reached it.

        Args:
            sent: the bytes that each sender sends.
            senders: the ranks that send; None: all ranks.
        """
        if senders is not None:
            self.of(senders)  # so that all ranks of a class send, or none
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
        """Make a stream wait until another stream of the same ranks has reached its current position."""
        for each in self.of(ranks):
            each.clocks[stream] = max(each.clocks.get(stream, 0.0), each.clocks.get(other, 0.0))

    # -- memory -------------------------------------------------------------------------------------

    def keep(self, storage: int, size: int, ranks: frozenset[int], line: Line) -> None:
        """Record a new storage on ranks, to which one value refers."""
        self._storages[storage] = (size, ranks, 1)
        self._change(ranks, size, line)

    def refer(self, storage: int) -> None:
        """Add a reference to a storage."""
        size, ranks, count = self._storages[storage]
        self._storages[storage] = (size, ranks, count + 1)

    def drop(self, storage: int) -> None:
        """Remove a reference to a storage. Without references, the storage is freed."""
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
        """Reset operations, exchanges and peaks. The memory of ranks stays."""
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
