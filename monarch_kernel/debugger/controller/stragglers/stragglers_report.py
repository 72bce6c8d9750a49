"""The result of `stragglers`: late ranks and the waits for them, as a sentence and tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from monarch_kernel.debugger.controller.stragglers.analysis import (
    CollectiveArrivals,
    Lateness,
    Straggler,
    find_stragglers,
)
from monarch_kernel.debugger.model.collective_times import CollectiveTimes
from monarch_kernel.debugger.source_locations import Label, SourceLocation
from monarch_kernel.display import styles
from monarch_kernel.display.reports import AsReport
from monarch_kernel.display.tables import TableView, table_html, table_text

#: The default for how many of the latest collectives of each line are examined.
LAST = 100
#: The maximum number of rows of a table, and of ranks whose arrival at one collective is shown.
MOST, MOST_RANKS = 40, 16


class StragglerReport(AsReport):
    """Ranks that arrive late at collectives, and the time that this costs. Displays itself as text and as HTML.

    Args:
        name: the subject of the report, such as `mesh trainers`.
        records: the records of all its ranks.
        last: how many of the latest collectives of each line to examine.
        notes: further information, each a sentence.
        label: labels files, such as `Cell In[3]`.
        each: also show when each rank arrived at each of the latest collectives.

    Attributes:
        name: as above.
        records: as above; `records.save` writes them to a file.
        last: as above.
        found: the result of their analysis.
        notes: as above, with notes about the records.
        each: as above.
    """

    def __init__(
        self,
        name: str,
        records: Sequence[CollectiveTimes],
        last: int = LAST,
        *,
        notes: Sequence[str] = (),
        label: Label | None = None,
        each: bool = False,
    ) -> None:
        self.name = name
        self.records = tuple(records)
        self.last = last
        self.found: Lateness = find_stragglers(self.records, last)
        own = [self.found.clocks.sentence] if self.found.clocks.sentence and not self.found.measured else []
        if self.found.incomplete:
            count = self.found.incomplete
            some = f"{count} collectives are" if count > 1 else "One collective is"
            own.append(f"{some} left out, which the records of some ranks do not have.")
        self.notes = (*notes, *own)
        self.label = label
        self.each = each

    @property
    def sentence(self) -> str:
        """The result in words."""
        found = self.found
        if not found.meetings:
            recorded = sum(len(record.calls) for record in self.records)
            if not recorded:
                return (
                    f"Nothing is recorded of collectives of {self.name}: no rank has called any, or PyTorch's Flight "
                    "Recorder is off (TORCH_FR_BUFFER_SIZE=0)."
                )
            return f"No collective is recorded on all of its ranks ({recorded} calls are recorded on {self.name})."
        over = f"{len(found.meetings)} collective{'s' * (len(found.meetings) != 1)} in {_time(found.span)}"
        if not found.stragglers:
            waited = sum(share.waited for share in found.ranks) / len(found.ranks)
            return f"No rank stands out in {over}; a rank waited {_time(waited)} for others, on average."
        return f"{' '.join(self._sentence(each) for each in found.stragglers)} ({over}.)"

    def _sentence(self, each: Straggler) -> str:
        late = each.lost / each.last
        where = f"{each.name}{self._at(each.place)}"
        if each.after is not None and each.after != each.place:
            where += f", after the collective{self._at(each.after)}"
        return (
            f"Rank {each.rank} keeps the others waiting: it came last to {each.last} of {each.meetings} collectives, "
            f"{_time(late)} late on average, {_time(each.lost)} of the {_time(self.found.lost)} that were lost; mostly "
            f"to {where}."
        )

    def _at(self, place: SourceLocation | None) -> str:
        return "" if place is None else f" at {place.where(self.label)}"

    def rank_table(self) -> TableView:
        """The cost of collectives for each rank, the worst straggler first."""
        shares = sorted(self.found.ranks, key=lambda share: (-share.lost, share.rank))
        hosts = {share.host for share in shares}
        rows = [
            (
                str(share.rank),
                share.host if len(hosts) > 1 else "",
                f"{share.last} of {share.meetings}",
                _time(share.lost),
                _time(share.waited),
            )
            for share in shares[:MOST]
        ]
        left = len(shares) - len(rows)
        headings = ("rank", "host", "came last", "time lost by it", "waited for others")
        note = f"and {left} more ranks" if left > 0 else ""
        return TableView(headings, rows, right=(0, 3, 4), note=note).without_empty_columns()

    def line_table(self) -> TableView:
        """The collectives by line, the most lost time first."""
        rows = [
            (
                f"{line.name}{self._at(line.place)}",
                str(line.count),
                ", ".join(f"{rank} ({count})" for rank, count in list(line.last.items())[:3]),
                _time(line.lost),
                _time(line.spread),
                _time(line.most),
            )
            for line in self.found.lines[:MOST]
        ]
        left = len(self.found.lines) - len(rows)
        headings = ("collective", "calls", "last rank (times)", "time lost", "first to last, median", "longest")
        note = f"and {left} more lines" if left > 0 else ""
        return TableView(headings, rows, right=(1, 3, 4, 5), note=note)

    def meeting_table(self) -> TableView:
        """The arrival of each rank at each of the latest collectives, as the delay after the first rank."""
        shown = self.found.meetings[-MOST:]
        ranks = sorted({rank for meeting in shown for rank in meeting.waits})[:MOST_RANKS]
        rows: list[tuple[str, ...]] = []
        for meeting in shown:
            arrivals = arrivals_of(meeting)
            rows.append(
                (
                    f"{meeting.name} #{meeting.number}{self._at(meeting.place)}",
                    str(meeting.last),
                    *(_time(arrivals[rank]) if rank in arrivals else "" for rank in ranks),
                )
            )
        headings = ("collective", "last", *(f"rank {rank}" for rank in ranks))
        return TableView(headings, rows, right=range(1, len(headings)))

    def text(self) -> str:
        """The report as text."""
        parts = [self.sentence, *self.notes]
        if self.found.meetings:
            parts += ["", table_text(self.rank_table()), "", table_text(self.line_table())]
            if self.each:
                parts += ["", table_text(self.meeting_table())]
        return "\n".join(parts)

    def html(self) -> str:
        """The report as HTML."""
        news = styles.NEWS if self.found.stragglers else ""
        notes = "".join(f'<div style="{styles.DIM}">{escape(note)}</div>' for note in self.notes)
        tables = [self.rank_table(), self.line_table(), *([self.meeting_table()] if self.each else [])]
        shown = "".join(map(table_html, tables)) if self.found.meetings else ""
        sentence = f'<div style="{styles.HEADLINE};{news}">{escape(self.sentence)}</div>'
        return f'<div style="{styles.VIEW}">{sentence}{notes}{shown}</div>'

    def asdict(self) -> dict[str, Any]:
        """Return the whole report as JSON-compatible dictionaries, lists, strings and numbers."""
        found = self.found
        return {
            "name": self.name,
            "sentence": self.sentence,
            "notes": list(self.notes),
            "seconds": found.span,
            "lost": found.lost,
            "measured": found.measured,
            "stragglers": [
                {
                    "rank": each.rank,
                    "last": each.last,
                    "collectives": each.meetings,
                    "lost": each.lost,
                    "name": each.name,
                    "place": _line(each.place),
                    "after": _line(each.after),
                }
                for each in found.stragglers
            ],
            "ranks": [
                {
                    "rank": share.rank,
                    "host": share.host,
                    "collectives": share.meetings,
                    "last": share.last,
                    "lost": share.lost,
                    "waited": share.waited,
                }
                for share in found.ranks
            ],
            "collectives": [
                {
                    "group": meeting.group,
                    "number": meeting.number,
                    "name": meeting.name,
                    "place": _line(meeting.place),
                    "moment": meeting.moment,
                    "last": meeting.last,
                    "lost": meeting.lost,
                    "arrivals": arrivals_of(meeting),
                    "waits": dict(meeting.waits),
                }
                for meeting in found.meetings
            ],
        }


def arrivals_of(meeting: CollectiveArrivals) -> dict[int, float]:
    """Return when each rank arrived at a collective, after the first one (seconds)."""
    longest = max(meeting.waits.values())
    return {rank: longest - wait for rank, wait in meeting.waits.items()}


def _line(place: SourceLocation | None) -> dict[str, Any] | None:
    return None if place is None else {"file": place.file, "line": place.line, "function": place.name}


def _time(seconds: float) -> str:
    """Format a duration, as accurately as clocks are: `0`, `0.4 ms`, `12 ms`, `1.3 s`."""
    if seconds < 5e-5:
        return "0"
    if seconds < 1e-2:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
