"""Report the computation, memory and communication of each simulated rank: `SimulationReport`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monarch_kernel.display.quantities import shown_location, text_size
from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.runtime.mesh.rankset import name_ranks
from monarch_kernel.runtime.tensor.simulation.ledger import Ledger, Line

#: The number of lines of the program that are shown.
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class SimulatedRanks:
    """Ranks that behave the same. All figures are for one of them.

    Attributes:
        ranks: the ranks.
        operations, flops: the numbers of operations and floating-point operations.
        seconds: the duration; `busy` is the part in operations, `communicating` the part in exchanges with other ranks.
        peak, kept: the maximum and final memory (bytes).
        peak_line: the line of the program that caused the peak: file, line, function.
        sent: the bytes that it sends, by kind of exchange.
    """

    ranks: tuple[int, ...]
    operations: int
    flops: int
    seconds: float
    busy: float
    communicating: float
    peak: int
    kept: int
    peak_line: Line
    sent: Mapping[str, int]


class SimulationReport(AsTable):
    """The results of a simulation, by ranks that behave the same, and by lines of the program.

    Attributes:
        groups: the groups of ranks.
        lines: for each line that caused exchanges, the bytes that a rank sent for it.
    """

    __slots__ = ("groups", "lines")

    def __init__(self, groups: Sequence[SimulatedRanks], lines: Mapping[Line, int]) -> None:
        self.groups = tuple(groups)
        self.lines = dict(lines)

    @classmethod
    def of(cls, ledger: Ledger) -> SimulationReport:
        """Create the report of a ledger."""
        groups = [
            SimulatedRanks(
                tuple(sorted(each.ranks)),
                each.operations,
                each.flops,
                each.time,
                each.busy,
                each.communicating,
                each.peak,
                each.current,
                each.peak_line,
                dict(each.sent),
            )
            for each in sorted(ledger.classes, key=lambda each: min(each.ranks))
        ]
        lines = {line: counts["sent"] for line, counts in ledger.lines.items() if counts["sent"]}
        return cls(groups, dict(sorted(lines.items(), key=lambda item: -item[1])))

    @property
    def seconds(self) -> float:
        """The duration of the slowest rank (seconds)."""
        return max(each.seconds for each in self.groups)

    @property
    def peak(self) -> int:
        """The maximum memory of a rank (bytes)."""
        return max(each.peak for each in self.groups)

    @property
    def sent(self) -> int:
        """The bytes that all ranks send."""
        return sum(len(each.ranks) * sum(each.sent.values()) for each in self.groups)

    def table(self) -> TableView:
        """Return a table with one row for each group of ranks."""
        rows = [
            (
                name_ranks(each.ranks),
                f"{each.operations:,}",
                _flops(each.flops),
                _time(each.seconds),
                _time(each.communicating),
                text_size(each.peak),
                shown_location(*each.peak_line[:2]) if each.peak_line[1] else "",
                text_size(each.kept),
                ", ".join(f"{text_size(size)} {kind}" for kind, size in sorted(each.sent.items())),
            )
            for each in self.groups
        ]
        headings = ("each of", "operations", "flops", "takes", "exchanges", "peak", "at", "kept", "sends")
        count = sum(len(each.ranks) for each in self.groups)
        caption = (
            f"{count:,} simulated ranks: {_time(self.seconds)} estimated, up to {text_size(self.peak)} on a rank, "
            f"{text_size(self.sent)} sent by all"
        )
        shown = [f"{shown_location(*line[:2])} {text_size(size)}" for line, size in list(self.lines.items())[:_SHOWN]]
        note = f"Sent by a rank, by line: {', '.join(shown)}" if shown else ""
        return TableView(headings, rows, caption, frozenset({1, 2, 3, 4, 5, 7}), note).without_empty_columns()


def _flops(count: int) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}" if count else ""


def _time(seconds: float) -> str:
    if not seconds:
        return ""
    return (
        f"{seconds:.3g} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.3g} µs"
    )
