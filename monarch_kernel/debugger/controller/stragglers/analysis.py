"""Compute when each rank arrived at each collective, how long it waited, and which ranks kept others waiting. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from monarch_kernel.debugger.model.collective_times import CollectiveTimes, TimedCollective
from monarch_kernel.debugger.source_locations import SourceLocation

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
