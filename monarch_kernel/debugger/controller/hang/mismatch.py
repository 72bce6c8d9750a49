"""Ranks that have entered different operations, or the same one with different arguments. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monarch_kernel.debugger.controller.hang import history, phrases, verdict
from monarch_kernel.debugger.controller.hang.conclusion import as_they_are, conclude
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
#: The kind of verdict for a divergence of histories.
_KINDS = {history.SKIPPED: verdict.SKIPPED, history.EXTRA: verdict.EXTRA}


@dataclass(frozen=True, slots=True)
class _Vote:
    """The side that is right, if there is a clear majority, and the ranks whose side is unknown."""

    majority: list[int]
    unknown: set[int]
    likely: bool = False


def mismatch(now: Situation, pending: PendingOperation) -> Verdict | None:
    """Ranks that have entered different operations under the same number."""
    if not pending.number:
        return _unnumbered(now, pending)
    name = pending.group.name
    calls = {rank: call for rank in pending.entered if (call := now.evidence[rank].at(name, pending.number))}
    roots = {rank: wait.root for rank, wait in pending.waiting.items() if wait.root >= 0}
    kinds: list[tuple[str, dict[int, object]]] = [
        (verdict.ORDER, {rank: call.op for rank, call in calls.items()}),
        (verdict.SHAPE, {rank: _size(call) for rank, call in calls.items()}),
        (verdict.ROOT, dict(roots.items())),
    ]
    for kind, values in kinds:
        if len(set(values.values())) > 1:
            if kind == verdict.SHAPE and len({call.name for call in calls.values()}) > 1:
                kind = verdict.ORDER  # different operations that the backend implements the same way
            return _by_vote(now, kind, values, calls, pending, roots)
    return None


def _unnumbered(now: Situation, pending: PendingOperation) -> Verdict | None:
    """Ranks in an operation without a number, while others of the group are in another one."""
    others: dict[int, Operation] = {}
    for other in now.pending:
        if other is not pending and other.group == pending.group and other.group.name:
            others.update({rank: wait.operation for rank, wait in other.waiting.items() if rank in pending.absent})
    if not others:
        return None
    calls = {rank: wait.operation for rank, wait in pending.waiting.items()} | others
    values: dict[int, object] = {rank: call.name for rank, call in calls.items()}
    return _by_vote(now, verdict.ORDER, values, calls, pending, {})


def _by_vote(
    now: Situation,
    kind: str,
    values: Mapping[int, object],
    calls: Mapping[int, Operation],
    pending: PendingOperation,
    roots: Mapping[int, int],
) -> Verdict:
    """Ranks that made different calls at the same point: a clear minority is to blame."""
    sides: dict[object, list[int]] = {}
    for rank in sorted(values):
        sides.setdefault(values[rank], []).append(rank)
    ordered = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))

    def called(rank: int) -> str:
        return phrases.called(calls[rank], kind, roots.get(rank, -1))

    vote = _vote(now, ordered, calls, pending, set(values))
    if not vote.majority:
        culprits = [Culprit(rank, calls[rank].place, called(rank)) for rank in sorted(values)]
        culprits += as_they_are(now, sorted(vote.unknown))
        told = tuple(f"{phrases.ranks(ranks)} {called(ranks[0])}" for ranks in ordered)
        return conclude(now, verdict.UNDECIDED, culprits, phrases.no_majority(pending, told), alternatives=told)
    # The rank that has gone furthest shows the most of what comes next.
    reference = max(vote.majority, key=lambda rank: now.evidence[rank].last(pending.group.name))
    culprits: list[Culprit] = []
    odd: list[str] = []
    kinds: set[str] = set()
    for ranks in ordered:
        if ranks == vote.majority:
            continue
        found = now.divergence(ranks[0], reference, pending.group.name)
        own_kind = _KINDS.get(found.kind, kind) if kind != verdict.ROOT else kind
        place, why = calls[ranks[0]].place, called(ranks[0])
        if own_kind != kind:
            place, why = found.calls[0].place, phrases.instead_of(found, why)
        kinds.add(own_kind)
        odd.append(f"{phrases.ranks(ranks)} {why}")
        culprits += [Culprit(rank, place, why, calls[reference].place) for rank in ranks]
    majority = f"{phrases.ranks(vote.majority)} {called(reference)}"
    order = kinds == {verdict.ORDER}
    sentence = phrases.outvoted(pending, odd, majority, likely=vote.likely, order=order)
    return conclude(now, kinds.pop() if len(kinds) == 1 else kind, culprits, sentence, likely=vote.likely)


def _vote(
    now: Situation,
    sides: Sequence[list[int]],
    calls: Mapping[int, Operation],
    pending: PendingOperation,
    known: set[int],
) -> _Vote:
    """The side that is a clear majority, whatever the unknown ranks did."""
    unknown = (pending.absent | pending.entered) - known
    aborted = {rank for rank in unknown if has_aborted(now.evidence[rank])}
    largest, rest = sides[0], sum(len(side) for side in sides[1:])
    if len(largest) > rest + len(unknown) + pending.outside:
        return _Vote(largest, unknown)
    if len({call.op for call in calls.values()}) == 1 and unknown == aborted and not pending.outside:
        # gloo aborts a process that receives more than it has room for: it did not call with the most elements.
        most = max(calls.values(), key=lambda call: call.elements).elements
        small = [side for side in sides if calls[side[0]].elements < most]
        if len(sides) == 2 and len(small) == 1:
            other = next(side for side in sides if side is not small[0])
            if len(small[0]) + len(aborted) > len(other):
                return _Vote(small[0], unknown, likely=True)
    if len(sides) == 2 and not unknown and not pending.outside:
        for wrong, right in (sides, sides[::-1]):
            known_calls = now.evidence[wrong[0]].history.get(pending.group.name, ())
            earlier = [call for call in known_calls if call.number < pending.number]
            if history.breaks_habit(earlier, calls[wrong[0]], calls[right[0]]):
                return _Vote(right, unknown, likely=True)
    return _Vote([], unknown)


def of_cycle(now: Situation, cycle: Sequence[int]) -> Verdict:
    """Ranks that wait for each other in different operations."""
    by_members: dict[tuple[int, ...], set[int]] = {}
    for pending in now.pending:
        by_members.setdefault(pending.group.ranks, set()).update(pending.waiting)
    for members, waiting in by_members.items():
        both = [each for each in now.pending if each.group.ranks == members]
        if len(both) == 2 and set(cycle) <= waiting:
            return _of_two_groups(now, both, cycle)
    culprits = [Culprit(rank, now.evidence[rank].place, "waits in the cycle") for rank in cycle]
    return conclude(now, verdict.CYCLE, culprits, phrases.in_a_cycle(now, cycle))


def _of_two_groups(now: Situation, both: Sequence[PendingOperation], cycle: Sequence[int]) -> Verdict:
    """The same ranks belong to two groups, and do not call their operations in the same order."""
    few, many = sorted(both, key=lambda each: len(each.waiting))
    told = phrases.waits_in(few), phrases.waits_in(many)
    unknown = len(few.group.ranks) - len(few.waiting) - len(many.waiting)
    if len(many.waiting) > len(few.waiting) + unknown:
        culprits = [Culprit(rank, wait.operation.place, told[0]) for rank, wait in few.waiting.items()]
        return conclude(now, verdict.ORDER, culprits, phrases.two_orders(*told, decided=True))
    culprits = [Culprit(rank, now.evidence[rank].place, "may be wrong") for rank in cycle]
    sentence = phrases.two_orders(*told, decided=False)
    return conclude(now, verdict.UNDECIDED, culprits, sentence, alternatives=told)


def last_mismatch(now: Situation) -> Verdict | None:
    """The last collective in which the sizes differed between ranks that have since failed."""
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
        outside = len(group.ranks) - len(known)
        return mismatch(now, PendingOperation(group, last, waiting, set(calls), known - set(calls), outside))
    return None


def has_aborted(each: Evidence) -> bool:
    """Whether a rank has died the way gloo aborts a process that receives more than it has room for."""
    return each.state == DEAD and each.signal == signal.SIGABRT


def _size(call: Operation) -> object:
    """What must be equal on all ranks, for operations that require inputs of equal size."""
    if call.op not in _EVEN and call.name not in _EVEN:
        return None
    return call.elements, call.dtypes


def cycle_of(edges: Mapping[int, set[int]]) -> list[int]:
    """Ranks that wait for each other in a cycle, in that order; [] if there is none."""
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
