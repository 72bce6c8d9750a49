"""Find ranks that arrive late at collectives, how long others wait for them, and at which lines (`stragglers`).

The records come from the ranks of a mesh, or from files. The analysis compares the clocks of hosts first. The result, a
`StragglerReport`, displays itself.
"""

from __future__ import annotations

import gzip
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise
from typing import Any

import msgspec

from monarch_kernel.actor import ActorMesh, ProcMesh
from monarch_kernel.debugger.controller.query import ask, chosen_ranks
from monarch_kernel.debugger.model.evidence import CollectiveTimes, TimedCollective
from monarch_kernel.debugger.rank.hang import collective_times
from monarch_kernel.debugger.source_locations import Label, SourceLocation
from monarch_kernel.display.tables import DIM, HEADLINE, NEWS, VIEW, AsReport, TableView, table_html, table_text
from monarch_kernel.introspection import hosts_of, whole_of
from monarch_kernel.meshes import format_ranks
from monarch_kernel.private_files import write_own_file
from monarch_kernel.workers import client_path

# Compute when each rank arrived at each collective, how long it waited, and which ranks kept others waiting. Pure.

#: Parts of the names of operations in which each rank waits for all others.
_SYNCHRONISING = (
    *("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "barrier", "all_to_all", "alltoall"),
)
#: The accuracy of the time of a call between processes of one host (seconds).
EXACT = 1e-3


@dataclass(frozen=True, slots=True)
class Clocks:
    """A comparison of the clocks of hosts.

    Attributes:
        ahead: how far each clock is ahead of the first one (seconds).
        within: the accuracy of that (seconds); infinite for clocks that could not be compared.
        sentence: the same in words; "" if there is only one clock.
    """

    ahead: Mapping[str, float] = field(default_factory=dict[str, float])
    within: float = 0.0
    sentence: str = ""

    def common(self, clock: str, moment: float) -> float:
        """Convert a time of this clock to a time of the first clock."""
        return moment - self.ahead.get(clock, 0.0)


def compare_clocks(records: Iterable[CollectiveTimes]) -> Clocks:
    """Compare the clocks of hosts, using only the collectives of their ranks.

    In a collective that synchronises, such as `all_reduce`, no rank continues before every rank has entered it. So a
    rank's next call is later than every rank's call of this one. Each such pair limits how far one host's clock can be
    ahead of another's, from both sides; the limits are narrow where calls follow each other closely.
    """
    known = [record for record in records if record.calls]
    clocks = list(dict.fromkeys(record.clock for record in known))
    if len(clocks) < 2:
        return Clocks()
    if _overtakes(known):
        return Clocks(
            within=math.inf,
            sentence="The clocks of hosts could not be compared, as the program does not wait for its collectives; "
            "moments are as these clocks tell.",
        )
    by_clock = {clock: [record for record in known if record.clock == clock] for clock in clocks}
    ahead: dict[str, float] = {clocks[0]: 0.0}
    within = 0.0
    for clock in clocks[1:]:
        low, high = -_least_gap(by_clock[clocks[0]], by_clock[clock]), _least_gap(by_clock[clock], by_clock[clocks[0]])
        if not (math.isfinite(low) and math.isfinite(high)) or low > high + 2 * EXACT:
            ahead[clock], within = 0.0, math.inf
        elif low <= 0 <= high:
            ahead[clock], within = 0.0, max(within, min(-low, high))
        else:
            ahead[clock], within = (low + high) / 2, max(within, abs(high - low) / 2)
    if not math.isfinite(within):
        sentence = "The clocks of hosts could not be compared by their collectives; times are those of these clocks."
    elif any(ahead.values()):
        apart = max(ahead.values()) - min(ahead.values())
        sentence = (
            f"The clocks of hosts are up to {apart:.3g} s apart, which is allowed for (within {within * 1e3:.3g} ms)."
        )
    else:
        sentence = f"The clocks of hosts agree, as far as their collectives tell (within {within * 1e3:.3g} ms)."
    return Clocks(ahead, within, sentence)


def _least_gap(mine: Sequence[CollectiveTimes], others: Sequence[CollectiveTimes]) -> float:
    """Return the shortest time from a call of the others to my next call, by uncorrected clocks (seconds)."""
    latest: dict[tuple[str, str, int], float] = {}
    for record in others:
        for call in record.calls:
            if _synchronises(call):
                key = (record.world, call.group, call.number)
                latest[key] = max(call.entered, latest.get(key, -math.inf))
    found = math.inf
    for record in mine:
        for call, after in pairwise(record.calls):
            theirs = latest.get((record.world, call.group, call.number)) if _synchronises(call) else None
            if theirs is not None:
                found = min(found, after.entered - theirs)
    return found


def _overtakes(records: Sequence[CollectiveTimes]) -> bool:
    """Return whether ranks of one clock make a call before all have entered the last one, without waiting for it."""
    by_clock: dict[str, list[CollectiveTimes]] = {}
    for record in records:
        by_clock.setdefault(record.clock, []).append(record)
    return any(_least_gap(same, same) < -EXACT for same in by_clock.values() if len(same) > 1)


def _synchronises(call: TimedCollective) -> bool:
    return any(word in call.op for word in _SYNCHRONISING)


#: A rank is a straggler if it causes this share of the lost time; with few ranks, `_BY_CHANCE` times an equal share.
_SHARE, _BY_CHANCE = 0.3, 1.5
#: Lost time is reported from this share of the examined time on.
_MATTERS = 0.02


@dataclass(frozen=True, slots=True)
class CollectiveArrivals:
    """A collective that all its ranks have entered.

    Attributes:
        group: the process group.
        number: the number of the collective in its group.
        name: the function that user code called.
        place: the line that called it, on the rank that arrived last.
        after: the line of that rank's previous collective; None if there is none.
        waits: how long each rank waited for the last one, by rank (seconds).
        last: the rank that arrived last.
        lost: how much later it arrived than the median rank (seconds).
        moment: when it arrived, by the first clock.
    """

    group: str
    number: int
    name: str
    place: SourceLocation | None
    after: SourceLocation | None
    waits: Mapping[int, float]
    last: int
    lost: float
    moment: float


@dataclass(slots=True)
class RankShare:
    """The time that a rank lost in collectives, and the time that it cost others.

    Attributes:
        rank: the rank in its mesh.
        host: its host.
        meetings: the number of collectives in which it took part.
        last: the number of collectives at which it arrived last.
        waited: how long it waited for others in total (seconds).
        lost: how much later than the median rank it arrived when it was the last, in total (seconds).
    """

    rank: int
    host: str
    meetings: int = 0
    last: int = 0
    waited: float = 0.0
    lost: float = 0.0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that others wait for repeatedly.

    Attributes:
        rank: the rank in its mesh.
        last: the number of collectives at which it arrived last.
        meetings: the number of collectives in which it took part.
        lost: the time that this cost (seconds).
        place: the line of the collective at which it most often arrives late.
        after: the line of its previous collective: the rank is slow between the two.
        name: the function that is called there.
    """

    rank: int
    last: int
    meetings: int
    lost: float
    place: SourceLocation | None
    after: SourceLocation | None
    name: str


@dataclass(frozen=True, slots=True)
class LineShare:
    """The collectives of one line.

    Attributes:
        name: the function that is called.
        place: the line.
        group: the process group.
        count: the number of collectives.
        last: how often each rank arrived last.
        lost: the time that was lost there (seconds).
        spread: the median time between the arrivals of the first and the last rank (seconds).
        most: the longest such time.
    """

    name: str
    place: SourceLocation | None
    group: str
    count: int
    last: Mapping[int, int]
    lost: float
    spread: float
    most: float


@dataclass(frozen=True, slots=True)
class Lateness:
    """The lateness of ranks at collectives, computed from their records.

    Attributes:
        meetings: the collectives that all their ranks have entered, oldest first.
        ranks: the cost of these collectives for each rank.
        lines: the collectives by line, the most lost time first.
        stragglers: the ranks that others wait for, the worst first.
        span: the time from the first to the last collective (seconds).
        incomplete: the number of collectives that some of their ranks have not entered, or no longer record.
        clocks: how the clocks of hosts were compared.
        measured: whether durations were recorded, so that clocks do not matter.
    """

    meetings: tuple[CollectiveArrivals, ...]
    ranks: tuple[RankShare, ...]
    lines: tuple[LineShare, ...]
    stragglers: tuple[Straggler, ...]
    span: float = 0.0
    incomplete: int = 0
    clocks: Clocks = field(default_factory=Clocks)
    measured: bool = False

    @property
    def lost(self) -> float:
        """How much later the last rank arrived than the median one, over all collectives (seconds)."""
        return sum(meeting.lost for meeting in self.meetings)


def find_stragglers(records: Iterable[CollectiveTimes], last: int) -> Lateness:
    """Compute when each rank arrived at the latest collectives, and which ranks kept others waiting.

    Args:
        records: the records of all ranks.
        last: how many of the latest collectives of each line to examine.
    """
    known = sorted(records, key=lambda record: record.rank)
    clocks = compare_clocks(known)
    ranks = {(record.world, record.dist_rank): record.rank for record in known}
    calls: dict[tuple[str, str, int], dict[int, tuple[TimedCollective, TimedCollective | None]]] = {}
    members: dict[tuple[str, str], tuple[int, ...]] = {}
    clock_of = {record.rank: record.clock for record in known}
    for record in known:
        before: TimedCollective | None = None
        for call in record.calls:
            calls.setdefault((record.world, call.group, call.number), {})[record.rank] = (call, before)
            before = call
        for name, group in record.groups.items():
            members[record.world, name] = group
    found: list[CollectiveArrivals] = []
    incomplete = 0
    measured = False
    for (world, group, number), entered in calls.items():
        wanted = members.get((world, group), ())
        here = [ranks[world, each] for each in wanted if (world, each) in ranks]
        if len(here) < len(wanted) or any(rank not in entered for rank in here):
            incomplete += 1
            continue
        if len(here) < 2:
            continue
        seconds = all(call.seconds > 0 for call, _ in entered.values())
        measured = measured or seconds
        found.append(_meeting(group, number, entered, seconds, clocks, clock_of))
    meetings = _latest(sorted(found, key=lambda each: each.moment), last)
    shares = _shares(meetings, known)
    span = meetings[-1].moment - meetings[0].moment + max(meetings[0].waits.values()) if meetings else 0.0
    told = Lateness(tuple(meetings), shares, _lines(meetings), (), span, incomplete, clocks, measured)
    return replace(told, stragglers=_stragglers(told))


def _meeting(
    group: str,
    number: int,
    entered: Mapping[int, tuple[TimedCollective, TimedCollective | None]],
    measured: bool,
    clocks: Clocks,
    clock_of: Mapping[int, str],
) -> CollectiveArrivals:
    moments = {rank: clocks.common(clock_of[rank], call.entered) for rank, (call, _) in entered.items()}
    if measured:
        # All ranks leave at the same moment, so the rank that was in the collective for the shortest time arrived last.
        shortest = min(call.seconds for call, _ in entered.values())
        waits = {rank: call.seconds - shortest for rank, (call, _) in entered.items()}
    else:
        latest = max(moments.values())
        waits = {rank: latest - moment for rank, moment in moments.items()}
    last = min(waits, key=lambda rank: (waits[rank], rank))
    # The median of the waits is the lateness of the last rank; with two ranks, it is the wait of the other one.
    lost = statistics.median_high(waits.values())
    call, before = entered[last]
    after = before.place if before is not None else None
    return CollectiveArrivals(group, number, call.name, call.place, after, waits, last, lost, moments[last])


def _latest(meetings: Sequence[CollectiveArrivals], last: int) -> list[CollectiveArrivals]:
    """Return the latest `last` collectives of each line."""
    counts: Counter[object] = Counter()
    kept: list[CollectiveArrivals] = []
    for meeting in reversed(meetings):
        key = _line_of(meeting)
        counts[key] += 1
        if counts[key] <= last:
            kept.append(meeting)
    return kept[::-1]


def _line_of(meeting: CollectiveArrivals) -> tuple[str, str, tuple[str, int] | None]:
    place = meeting.place
    return meeting.group, meeting.name, None if place is None else (place.file, place.line)


def _shares(meetings: Sequence[CollectiveArrivals], records: Sequence[CollectiveTimes]) -> tuple[RankShare, ...]:
    shares = {record.rank: RankShare(record.rank, record.host) for record in records}
    for meeting in meetings:
        for rank, wait in meeting.waits.items():
            shares[rank].meetings += 1
            shares[rank].waited += wait
        shares[meeting.last].last += 1
        shares[meeting.last].lost += meeting.lost
    return tuple(shares.values())


def _lines(meetings: Sequence[CollectiveArrivals]) -> tuple[LineShare, ...]:
    by_line: dict[object, list[CollectiveArrivals]] = {}
    for meeting in meetings:
        by_line.setdefault(_line_of(meeting), []).append(meeting)
    lines: list[LineShare] = []
    for same in by_line.values():
        spreads = [max(meeting.waits.values()) for meeting in same]
        last = Counter(meeting.last for meeting in same)
        lost = sum(meeting.lost for meeting in same)
        first = same[0]
        lines.append(
            LineShare(
                first.name,
                first.place,
                first.group,
                len(same),
                dict(last.most_common()),
                lost,
                statistics.median(spreads),
                max(spreads),
            )
        )
    return tuple(sorted(lines, key=lambda line: -line.lost))


def _stragglers(told: Lateness) -> tuple[Straggler, ...]:
    if not told.meetings or told.lost < _MATTERS * told.span:
        return ()
    exact = EXACT if told.measured else max(EXACT, told.clocks.within)
    bar = max(_SHARE, _BY_CHANCE / len(told.ranks))
    found: list[Straggler] = []
    for share in sorted(told.ranks, key=lambda share: -share.lost):
        if not share.last or share.lost < bar * told.lost or share.lost / share.last < exact:
            continue
        by_line: dict[object, list[CollectiveArrivals]] = {}
        for meeting in told.meetings:
            if meeting.last == share.rank:
                by_line.setdefault((*_line_of(meeting), meeting.after), []).append(meeting)
        worst = max(by_line.values(), key=lambda same: sum(meeting.lost for meeting in same))[0]
        found.append(
            Straggler(share.rank, share.last, share.meetings, share.lost, worst.place, worst.after, worst.name)
        )
    return tuple(found)


# The result of `stragglers`: late ranks and the waits for them, as a sentence and tables.

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
        news = NEWS if self.found.stragglers else ""
        notes = "".join(f'<div style="{DIM}">{escape(note)}</div>' for note in self.notes)
        tables = [self.rank_table(), self.line_table(), *([self.meeting_table()] if self.each else [])]
        shown = "".join(map(table_html, tables)) if self.found.meetings else ""
        sentence = f'<div style="{HEADLINE};{news}">{escape(self.sentence)}</div>'
        return f'<div style="{VIEW}">{sentence}{notes}{shown}</div>'

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


def _line(place: SourceLocation | None) -> dict[str, object] | None:
    return None if place is None else {"file": place.file, "line": place.line, "function": place.name}


def _time(seconds: float) -> str:
    """Format a duration, as accurately as clocks are: `0`, `0.4 ms`, `12 ms`, `1.3 s`."""
    if seconds < 5e-5:
        return "0"
    if seconds < 1e-2:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


# Query the ranks of a mesh for the times at which they entered their latest collectives.

#: How many collectives of each group a rank reports: all that PyTorch keeps by default.
DEPTH = 2000


def stragglers(
    mesh: ProcMesh | ActorMesh[object],
    *,
    last: int = LAST,
    ranks: Iterable[int] | None = None,
    timeout: float = 10.0,
    label: Label | None = None,
    each: bool = False,
) -> StragglerReport:
    """Find ranks that arrive late at collectives, how long others wait for them, and at which lines.

    Reads existing records: PyTorch's Flight Recorder keeps the latest 2,000 collectives of a process.

    Args:
        mesh: a proc mesh or an actor mesh, or a slice of one.
        last: how many of the latest collectives of each line to examine.
        ranks: the ranks of the mesh; all by default.
        timeout: how long to wait for ranks that do not answer (seconds).
        label: labels files, such as `Cell In[3]`.
        each: also show when each rank arrived at each of the latest collectives.

    Raises:
        ValueError: the mesh has no such rank, or `last` is not positive.
        TypeError: `mesh` is not a mesh.
        RuntimeError: the mesh was stopped.
    """
    if last < 1:
        raise ValueError(f"last is a number of at least 1, not {last}")
    whole = whole_of(mesh)
    chosen = chosen_ranks(ranks, len(whole.ranks))
    answers = ask(mesh, collective_times, DEPTH, ranks=chosen, timeout=timeout)
    hosts = hosts_of(whole.procs)
    records = [
        _at_client(msgspec.structs.replace(each, rank=rank, host=hosts[whole.ranks[rank]] or each.host))
        for rank, each in answers.values.items()
    ]
    notes = (
        [f"Ranks {format_ranks(answers.late, limit=8)} did not answer within {timeout:g} s."] if answers.late else []
    )
    notes += [f"Rank {rank} is dead: {why}." for rank, why in sorted(answers.dead.items())]
    notes += [f"Rank {rank} could not report: {answers.error_of(rank)}" for rank in sorted(answers.errors)]
    return StragglerReport(f"mesh {whole.procs.name}", records, last, notes=notes, label=label, each=each)


def _at_client(record: CollectiveTimes) -> CollectiveTimes:
    """Return a copy of a record that uses the controller's file names, so that records of all hosts are comparable."""
    names: dict[str, str] = {}

    def named(place: SourceLocation | None) -> SourceLocation | None:
        if place is None:
            return None
        if place.file not in names:
            names[place.file] = client_path(place.file) or place.file
        return place._replace(file=names[place.file])

    calls = tuple(msgspec.structs.replace(call, place=named(call.place)) for call in record.calls)
    return msgspec.structs.replace(record, calls=calls)


# Read and write files of records: those that a report has saved, and traces of `torch.profiler`.
#
# Nothing in a file is executed. Both kinds are JSON and are validated when they are read.

#: The value that identifies a file of saved records.
_FORM = "monarch-collectives-1"
#: Limits for decompressing a file: bytes, and multiples of its size. JSON traces rarely compress more than 30 times.
_LARGEST, _RATIO = 16 << 20, 64


class RecordsError(ValueError):
    """A file has no records of collectives. The message contains its name and the reason."""


class _File(msgspec.Struct):
    form: str
    name: str
    records: list[CollectiveTimes]


class _Profiled(msgspec.Struct):
    """The part of a trace of `torch.profiler` that is read."""

    events: list[dict[str, Any]] = msgspec.field(name="traceEvents")
    distributed: dict[str, Any] = msgspec.field(default_factory=dict[str, Any], name="distributedInfo")
    host: str = msgspec.field(default="", name="host_name")
    base: int = msgspec.field(default=0, name="baseTimeNanoseconds")


def save(report: StragglerReport, path: str) -> None:
    """Write the records of a report to a file that only this user can read.

    Raises:
        OSError: the file cannot be written.
    """
    write_own_file(path, msgspec.json.encode(_File(_FORM, report.name, list(report.records))))


def report_of(
    paths: Sequence[str], last: int = LAST, *, label: Label | None = None, each: bool = False
) -> StragglerReport:
    """Build a report from files: one that was saved, or a `torch.profiler` trace of each rank.

    Args:
        paths: the files; those that end in `.gz` are compressed.
        last: how many of the latest collectives of each line to examine.
        label: labels files, such as `Cell In[3]`.
        each: also show when each rank arrived at each of the latest collectives.

    Raises:
        RecordsError: a file cannot be read or has another format, or two files are of the same rank.
    """
    records: list[CollectiveTimes] = []
    names: list[str] = []
    for path in paths:
        data = _contents(path)
        try:
            saved = msgspec.json.decode(data, type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError):
            records.append(_of_profile(path, data))
            continue
        if saved.form != _FORM:
            raise RecordsError(f"{path} was written by another version ({saved.form!r})")
        records += saved.records
        names.append(saved.name)
    ranks = [record.rank for record in records]
    if len(set(ranks)) < len(ranks):
        raise RecordsError(f"several of these files are of rank {next(r for r in ranks if ranks.count(r) > 1)}")
    name = ", ".join(names) or f"{len(records)} traces of torch.profiler"
    return StragglerReport(name, records, last, label=label, each=each)


def _contents(path: str) -> bytes:
    try:
        if not path.endswith(".gz"):
            with open(path, "rb") as file:
                return file.read()
        most = _LARGEST + _RATIO * os.stat(path).st_size
        with gzip.open(path) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise RecordsError(f"{path} is larger than what a compressed trace of its size can be")
        return data
    except (EOFError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RecordsError(f"{path} cannot be read: {why}") from None


def _of_profile(path: str, data: bytes) -> CollectiveTimes:
    """Read the collectives in a trace of one rank.

    Their durations last until all ranks have arrived, so clocks do not matter. Numbers count from the beginning of the
    trace, so the traces of all ranks must begin at the same step.
    """
    try:
        trace = msgspec.json.decode(data, type=_Profiled)
        rank = int(trace.distributed["rank"])
        groups = {
            str(group["pg_name"]): tuple(int(member) for member in group["ranks"])
            for group in trace.distributed["pg_config"]
        }
        events = [(float(event["ts"]), event) for event in trace.events if _is_collective(event)]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise RecordsError(
            f"{path} has no records of collectives: it is neither a file of 'stragglers --save' nor a trace that "
            f"torch.profiler has exported in a distributed program ({type(error).__name__}: {error})"
        ) from None
    several = [name for name, members in groups.items() if len(members) > 1]
    if len(several) > 1:
        raise RecordsError(
            f"{path}: the program has {len(several)} process groups, and traces of gloo do not say of which a "
            "collective is; %mesh stragglers reads PyTorch's Flight Recorder, which does"
        )
    calls = _calls(sorted(events, key=lambda each: each[0]), several[0] if several else "", trace.base)
    return CollectiveTimes(rank, rank, "", trace.host, trace.host, groups, tuple(calls))


def _is_collective(event: dict[str, Any]) -> bool:
    return event.get("ph") == "X" and event.get("cat") == "user_annotation" and event["name"].startswith("gloo:")


def _calls(events: Iterable[tuple[float, dict[str, Any]]], group: str, base: int) -> Iterable[TimedCollective]:
    """Convert these events to collectives, ordered by time."""
    for number, (moment, event) in enumerate(events, 1):
        op = str(event["name"]).partition(":")[2]
        entered = base / 1e9 + moment / 1e6
        yield TimedCollective(group, number, op, op, None, entered, float(event.get("dur") or 0.0) / 1e6)
