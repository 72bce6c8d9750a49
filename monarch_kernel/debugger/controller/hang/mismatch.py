"""Ranks that have entered different operations, or the same one with other sizes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monarch_kernel.debugger.controller.hang import history, phrases, verdict
from monarch_kernel.debugger.controller.hang.situation import PendingOperation, Situation
from monarch_kernel.debugger.controller.hang.verdict import Culprit, Verdict
from monarch_kernel.debugger.model.evidence import DEAD, Evidence, Operation, Wait

#: Operations whose input must have the same size on all ranks.
_EVEN = {
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "_all_gather_base",
    "reduce_scatter",
    "_reduce_scatter_base",
}
#: What a difference of histories is called in a verdict.
_PARTED = {history.SKIPPED: verdict.SKIPPED, history.EXTRA: verdict.EXTRA}


@dataclass(frozen=True, slots=True)
class _Votes:
    """Which side is right, if one is a clear majority, and of whom it is not known."""

    majority: list[int]
    unknown: set[int]
    likely: bool = False


def mismatch(now: Situation, meeting: PendingOperation) -> Verdict | None:
    """Ranks that have entered an operation of one number, but not the same one."""
    if not meeting.number:
        return _mixed(now, meeting)
    name = meeting.group.name
    calls = {rank: call for rank in meeting.entered if (call := now.evidence[rank].at(name, meeting.number))}
    roots = {rank: wait.root for rank, wait in meeting.waiting.items() if wait.root >= 0}
    kinds: list[tuple[str, dict[int, object]]] = [
        (verdict.ORDER, {rank: call.op for rank, call in calls.items()}),
        (verdict.SHAPE, {rank: _size(call) for rank, call in calls.items()}),
        (verdict.ROOT, dict(roots.items())),
    ]
    for kind, values in kinds:
        if len(set(values.values())) > 1:
            if kind == verdict.SHAPE and len({call.name for call in calls.values()}) > 1:
                kind = verdict.ORDER  # different operations, which the backend does by the same one
            return _by_vote(now, kind, values, calls, meeting, roots)
    return None


def _mixed(now: Situation, meeting: PendingOperation) -> Verdict | None:
    """Ranks in an operation that nobody numbers, while others of the group are in another one."""
    others: dict[int, Operation] = {}
    for other in now.meetings:
        if other is not meeting and other.group == meeting.group and other.group.name:
            others.update({rank: wait.call for rank, wait in other.waiting.items() if rank in meeting.absent})
    if not others:
        return None
    calls = {rank: wait.call for rank, wait in meeting.waiting.items()} | others
    values: dict[int, object] = {rank: call.name for rank, call in calls.items()}
    return _by_vote(now, verdict.ORDER, values, calls, meeting, {})


def _by_vote(
    now: Situation,
    kind: str,
    values: Mapping[int, object],
    calls: Mapping[int, Operation],
    meeting: PendingOperation,
    roots: Mapping[int, int],
) -> Verdict:
    """Ranks that called different things at the same time: the few are to blame, if they are few."""
    sides: dict[object, list[int]] = {}
    for rank in sorted(values):
        sides.setdefault(values[rank], []).append(rank)
    ordered = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))
    group = phrases.group(meeting.group)

    def what(rank: int) -> str:
        return phrases.calling(calls[rank], kind, roots.get(rank, -1))

    told = [f"{phrases.ranks(ranks)} {what(ranks[0])}" for ranks in ordered]
    votes = _votes(now, ordered, calls, meeting, set(values))
    majority = votes.majority
    if not majority:
        culprits = [Culprit(rank, calls[rank].place, what(rank)) for rank in sorted(values)]
        culprits += [Culprit(rank, None, phrases.state(now.evidence[rank])) for rank in sorted(votes.unknown)]
        sentence = f"Undecided: for #{meeting.number} of {group}, " if meeting.number else "Undecided: "
        sentence += f"{phrases.joined(told)}; who of them is right cannot be told, as neither side is a clear majority."
        return now.verdict(verdict.UNDECIDED, culprits, sentence, alternatives=tuple(told))
    # Who has gone furthest tells most of what comes next.
    reference = max(majority, key=lambda rank: now.evidence[rank].last(meeting.group.name))
    culprits: list[Culprit] = []
    said: list[str] = []
    kinds: list[str] = []
    for ranks in ordered:
        if ranks == majority:
            continue
        found = now.parting(ranks[0], reference, meeting.group.name)
        place, text = calls[ranks[0]].place, what(ranks[0])
        kinds.append(_PARTED.get(found.kind, kind) if kind != verdict.ROOT else kind)
        if kinds[-1] != kind:
            place = found.calls[0].place
            text = f"{phrases.parted(found)}, so that it {text}"
        said.append(f"{phrases.ranks(ranks)} {text}")
        culprits += [Culprit(rank, place, text, calls[reference].place) for rank in ranks]
    number = f" (#{meeting.number} of {group})" if meeting.number else f" (in {group})"
    sentence = f"{phrases.joined(said)} where {phrases.ranks(majority)} {what(reference)}{number}"
    sentence = f"Most likely {sentence}" if votes.likely else phrases.capital(sentence)
    if set(kinds) == {verdict.ORDER}:
        sentence += "; the order differs, or one is left out or too many"
    return now.verdict(kinds[0] if len(set(kinds)) == 1 else kind, culprits, f"{sentence}.", likely=votes.likely)


def _votes(
    now: Situation,
    sides: Sequence[list[int]],
    calls: Mapping[int, Operation],
    meeting: PendingOperation,
    known: set[int],
) -> _Votes:
    """Which of these sides is a clear majority, whatever those do of whom nothing is known."""
    unknown = (meeting.absent | meeting.entered) - known
    aborted = {rank for rank in unknown if has_aborted(now.evidence[rank])}
    largest, rest = sides[0], sum(len(side) for side in sides[1:])
    if len(largest) > rest + len(unknown) + meeting.outside:
        return _Votes(largest, unknown)
    if len({call.op for call in calls.values()}) == 1 and unknown == aborted and not meeting.outside:
        # gloo aborts a process that receives more than it has room for: it did not call with the most elements.
        most = max(calls.values(), key=lambda call: call.elements).elements
        small = [side for side in sides if calls[side[0]].elements < most]
        if len(sides) == 2 and len(small) == 1:
            other = next(side for side in sides if side is not small[0])
            if len(small[0]) + len(aborted) > len(other):
                return _Votes(small[0], unknown, likely=True)
    if len(sides) == 2 and not unknown and not meeting.outside:
        for wrong, right in (sides, sides[::-1]):
            known_calls = now.evidence[wrong[0]].history.get(meeting.group.name, ())
            earlier = [call for call in known_calls if call.number < meeting.number]
            if history.breaks_habit(earlier, calls[wrong[0]], calls[right[0]]):
                return _Votes(right, unknown, likely=True)
    return _Votes([], unknown)


def of_circle(now: Situation, circle: Sequence[int]) -> Verdict:
    """Ranks that wait for each other in different operations."""
    doing = phrases.joined([phrases.doing([rank], phrases.state(now.evidence[rank])) for rank in circle])
    culprits = [Culprit(rank, now.evidence[rank].place, "waits in the circle") for rank in circle]
    sentence = f"These ranks wait for each other in a circle: {doing}."
    sides: dict[object, list[int]] = {}
    for meeting in now.meetings:
        for rank in meeting.waiting:
            sides.setdefault(meeting.group.ranks, []).append(rank)
    for members, who in sides.items():
        meetings = [each for each in now.meetings if each.group.ranks == members]
        if len(meetings) == 2 and set(circle) <= set(who):
            return _of_two_groups(now, meetings, circle)
    return now.verdict(verdict.CYCLE, culprits, sentence, likely=False)


def _of_two_groups(now: Situation, meetings: Sequence[PendingOperation], circle: Sequence[int]) -> Verdict:
    """The same ranks are in two groups, and do not call their operations in the same order."""
    few, many = sorted(meetings, key=lambda each: len(each.waiting))
    told = [phrases.waits_in(sorted(each.waiting), each.call, each.group) for each in (few, many)]
    unknown = few.outside + len(few.group.ranks) - few.outside - len(few.waiting) - len(many.waiting)
    if len(many.waiting) > len(few.waiting) + unknown:
        culprits = [Culprit(rank, wait.call.place, told[0]) for rank, wait in few.waiting.items()]
        sentence = f"{phrases.capital(told[0])} where {told[1]}: the order of the two differs."
        return now.verdict(verdict.ORDER, culprits, sentence)
    culprits = [Culprit(rank, now.evidence[rank].place, "may be wrong") for rank in circle]
    sentence = f"Undecided: {told[0]}, and {told[1]}; which of the two orders is right cannot be told."
    return now.verdict(verdict.UNDECIDED, culprits, sentence, alternatives=tuple(told))


def last_mismatch(now: Situation) -> Verdict | None:
    """The last collective for which ranks that have since failed did not have the same sizes."""
    for name in {name for each in now.evidence.values() for name in each.history}:
        have = [rank for rank, each in now.evidence.items() if each.history.get(name)]
        last = min((now.evidence[rank].last(name) for rank in have), default=0)
        calls = {rank: call for rank in have if (call := now.evidence[rank].at(name, last)) is not None}
        if len({(call.op, _size(call)) for call in calls.values()}) < 2:
            continue
        group = now.evidence[have[0]].groups[name]
        ranks = {now.known.get((now.evidence[have[0]].world, at)) for at in group.ranks}
        known = {rank for rank in ranks if rank is not None}
        waiting = {rank: Wait(call) for rank, call in calls.items()}
        meeting = PendingOperation(group, last, waiting, set(calls), known - set(calls), len(group.ranks) - len(known))
        return mismatch(now, meeting)
    return None


def has_aborted(each: Evidence) -> bool:
    """Whether a rank has ended as gloo ends those that receive more than they have room for."""
    return each.state == DEAD and "SIGABRT" in each.why


def _size(call: Operation) -> object:
    """What must be the same on all ranks for operations that take inputs of one size."""
    if call.op not in _EVEN and call.name not in _EVEN:
        return None
    return call.elements, call.dtypes


def circle_of(edges: Mapping[int, set[int]]) -> list[int]:
    """Ranks that wait for each other, in the order in which they do; [] if none do."""
    for start in sorted(edges):
        path = [start]
        seen = {start: 0}
        at = start
        while edges.get(at):
            at = min(edges[at])
            if at in seen:
                return path[seen[at] :]
            seen[at] = len(path)
            path.append(at)
    return []
