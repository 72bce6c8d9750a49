"""Derive a verdict from the evidence of ranks. Pure: takes evidence, returns a `Verdict`, possibly undecided.

Ranks wait for those of their process group that have not entered the same collective. Following these waits from rank
to rank leads to ranks that wait for none: they are dead, stopped, failed, elsewhere in their code, or finished
(`absence`). If it leads into a cycle, ranks have entered different collectives (`mismatch`). A clear majority decides
which of two sides is wrong; without one, the verdict is undecided. `phrases` has the wording.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from monarch_kernel.debugger.controller.hang import phrases, verdict
from monarch_kernel.debugger.controller.hang.phrases import PendingOperation, Situation
from monarch_kernel.debugger.controller.hang.verdict import Culprit, Verdict
from monarch_kernel.debugger.model.evidence import (
    DEAD,
    IDLE,
    LATE,
    LOADS,
    PAUSED,
    RUNS,
    SILENT,
    STANDS,
    UNASKED,
    UNREAD,
    WAITS,
    Evidence,
    Operation,
    Wait,
)
from monarch_kernel.debugger.source_locations import SourceLocation

# Build a verdict: the ranks to blame, the sentence, the activity of all ranks, and the timeouts of groups.


def conclude(
    now: Situation,
    kind: str,
    culprits: Sequence[Culprit],
    sentence: str,
    *,
    likely: bool = False,
    alternatives: tuple[str, ...] = (),
) -> Verdict:
    """Build a verdict about this situation. The arguments are as in `Verdict`."""
    rows = phrases.rows(now.evidence, {culprit.rank for culprit in culprits})
    notes = phrases.timeouts(now.evidence)
    return Verdict(kind, tuple(culprits), sentence, rows, likely, notes, now.mesh, alternatives)


def as_they_are(now: Situation, ranks: Sequence[int]) -> list[Culprit]:
    """Describe the activity of ranks without a line to blame."""
    return [Culprit(rank, None, phrases.state(now.evidence[rank])) for rank in ranks]


# Ranks that have entered different operations, or the same one with different arguments. Pure.

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
_KINDS = {phrases.SKIPPED: verdict.SKIPPED, phrases.EXTRA: verdict.EXTRA}


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
            if phrases.breaks_habit(earlier, calls[wrong[0]], calls[right[0]]):
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


# Ranks that others wait for in vain: dead, stopped, failed, elsewhere in their code, finished. Pure.

#: States of ranks that will never arrive by themselves, the most certain cause first.
FATAL = (DEAD, SILENT, PAUSED)
_FATAL_KINDS = {DEAD: verdict.DEAD, SILENT: verdict.SILENT, PAUSED: verdict.PAUSED}
_BUSY_KINDS = {LOADS: verdict.LOADER, RUNS: verdict.RUNNING, STANDS: verdict.STANDING}


def of_ends(now: Situation, ends: set[int], edges: Mapping[int, set[int]]) -> Verdict:
    """Explain why the ranks that all others wait for do not arrive.

    Args:
        now: the situation.
        ends: the ranks that others wait for, and that wait for no rank themselves.
        edges: the ranks that each rank waits for.
    """
    by_state: dict[str, list[int]] = {}
    for rank in sorted(ends):
        by_state.setdefault(now.evidence[rank].state, []).append(rank)
    for state in FATAL:
        if state in by_state:
            return gone(now, state, by_state[state])
    failed = [rank for rank in by_state.get(IDLE, ()) if _has_failed(now, rank)]
    own = [rank for rank in failed if not failure_of_peer(now, rank)]
    if own:
        return _will_not_come(now, verdict.FAILED, own)
    unknown = [rank for state in (LATE, UNREAD, UNASKED) for rank in by_state.get(state, ())]
    if unknown:
        return conclude(now, verdict.UNDECIDED, as_they_are(now, unknown), phrases.not_known(now, unknown))
    if failed:
        culprits = [Culprit(rank, _failure_place(now, rank), phrases.state(now.evidence[rank])) for rank in failed]
        return conclude(now, verdict.UNDECIDED, culprits, phrases.failed_of_peers(now, failed))
    busy = sorted(rank for state in _BUSY_KINDS for rank in by_state.get(state, ()))
    done = by_state.get(IDLE, [])
    return _absent(now, done, busy, edges)


def _has_failed(now: Situation, rank: int) -> bool:
    """Whether an exception has ended the code that the waiting ranks still run."""
    failure = now.evidence[rank].failure
    if failure is None:
        return False
    roots = {each.stack[0].file for each in now.evidence.values() if each.state == WAITS and each.stack}
    return not roots or not failure.root or failure.root in roots


def failure_of_peer(now: Situation, rank: int) -> bool:
    """Whether a rank has failed only because another rank was gone, or did not arrive."""
    failure = now.evidence[rank].failure
    return failure is not None and failure.of_peer


def _will_not_come(now: Situation, kind: str, ranks: Sequence[int]) -> Verdict:
    """Ranks that will certainly not arrive, and why."""
    culprits: list[Culprit] = []
    for rank in ranks:
        each = now.evidence[rank]
        place = each.failure.place if kind == verdict.FAILED and each.failure is not None else each.place
        culprits.append(Culprit(rank, place, phrases.state(each)))
    of_peer = [rank for rank in now.evidence if failure_of_peer(now, rank)] if kind == verdict.DEAD else []
    return conclude(now, kind, culprits, phrases.will_not_come(now, ranks, of_peer))


def gone(now: Situation, state: str, ranks: Sequence[int]) -> Verdict:
    """Ranks that will never arrive: dead, silent, or stopped by a debugger."""
    kind = _FATAL_KINDS[state]
    crashed = [rank for rank in ranks if _has_crashed(now.evidence[rank])]
    others = [rank for rank, each in now.evidence.items() if each.state == WAITS or failure_of_peer(now, rank)]
    if crashed and len(crashed) < len(ranks):
        # gloo may crash if its peer is gone, so these crashes prove nothing beside a rank that was killed.
        return _will_not_come(now, kind, [rank for rank in ranks if rank not in crashed])
    if len(crashed) > 1 or (others and any(has_aborted(now.evidence[rank]) for rank in crashed) and len(others) == 1):
        return _crashed(now, crashed, others if len(others) == 1 else [])
    # One has crashed. Two or more others have called the same operation, or a mismatch would have been reported: so its
    # call differed from theirs.
    return _will_not_come(now, kind, ranks)


def _has_crashed(each: Evidence) -> bool:
    return each.state == DEAD and each.signal in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


def _crashed(now: Situation, crashed: Sequence[int], others: Sequence[int]) -> Verdict:
    """Ranks that gloo may have ended, because one of them or another rank called something else."""
    culprits = as_they_are(now, crashed)
    culprits += [
        Culprit(rank, _failure_place(now, rank) or now.evidence[rank].place, phrases.state(now.evidence[rank]))
        for rank in others
    ]
    return conclude(now, verdict.UNDECIDED, culprits, phrases.crashed_by_gloo(now, crashed, others))


def _failure_place(now: Situation, rank: int) -> SourceLocation | None:
    failure = now.evidence[rank].failure
    return failure.place if failure is not None else None


def _absent(now: Situation, done: Sequence[int], busy: Sequence[int], edges: Mapping[int, set[int]]) -> Verdict:
    """Ranks that have finished, or are elsewhere in their code, while others wait for them."""
    missing = {*done, *busy}
    pending = next((each for each in now.pending if each.absent & missing and each.waiting), None)
    if pending is None:
        return _peers(now, sorted(missing), edges)
    absent = sorted(pending.absent & missing)
    present = sorted(pending.entered)
    unknown = len(pending.absent - missing) + pending.outside
    if len(absent) + unknown < len(present):
        return _skipped(now, absent, pending)
    if all(rank in busy for rank in absent) and all(_will_come(now, rank, pending) for rank in absent):
        return _skipped(now, absent, pending)
    if not set(absent) & set(busy) and len(present) + unknown < len(absent):
        return _extra(now, present, absent, pending)
    return _either(now, absent, present, pending)


def _will_come(now: Situation, rank: int, pending: PendingOperation) -> bool:
    """Whether a rank that is elsewhere has called from the others' line before, or will still reach that line."""
    place = pending.operation.place
    if place is None:
        return False
    line = (place.file, place.line)
    for earlier in now.evidence[rank].history.get(pending.group.name, ()):
        if earlier.place is not None and (earlier.place.file, earlier.place.line) == line:
            return True
    theirs = now.evidence[next(iter(pending.waiting))].stack
    for mine, other in zip(now.evidence[rank].stack, theirs, strict=False):
        if (mine.file, mine.name) != (other.file, other.name):
            return False
        if mine.line != other.line:
            return mine.line < other.line
    return False


def _skipped(now: Situation, absent: Sequence[int], pending: PendingOperation) -> Verdict:
    """The few ranks that are missing are to blame."""
    culprits: list[Culprit] = []
    alike: dict[tuple[str, str], list[int]] = {}
    waiting = next(iter(pending.waiting))
    certain = True
    for rank in absent:
        each = now.evidence[rank]
        found = now.divergence(rank, waiting, pending.group.name)
        kind = _BUSY_KINDS.get(each.state, "")
        place = each.place
        if found.kind == phrases.SKIPPED:
            kind, place = verdict.SKIPPED, found.calls[0].place
            why = phrases.skipped_and_is(found.calls, each)
        elif kind:
            why = phrases.not_entered(each)
        else:
            kind, place = verdict.SKIPPED, pending.operation.place
            why = phrases.never_entered(each)
        certain = certain and kind in (verdict.SKIPPED, verdict.LOADER)
        culprits.append(Culprit(rank, place, why))
        alike.setdefault((kind, why), []).append(rank)
    kinds = {kind for kind, _ in alike}
    sentence = phrases.absent(pending, [(why, ranks) for (_, why), ranks in alike.items()])
    return conclude(now, kinds.pop() if len(kinds) == 1 else verdict.SKIPPED, culprits, sentence, likely=not certain)


def _extra(now: Situation, present: Sequence[int], absent: Sequence[int], pending: PendingOperation) -> Verdict:
    """The few ranks that are in the operation are to blame: the others have finished without it."""
    culprits: list[Culprit] = []
    for rank in present:
        found = now.divergence(rank, absent[0], pending.group.name)
        call = found.calls[0] if found.kind == phrases.EXTRA else pending.operation
        place = call.place if found.kind == phrases.EXTRA else None
        if place is None:
            own = now.evidence[rank].at(pending.group.name, pending.number)
            place = own.place if own is not None else pending.operation.place
        culprits.append(Culprit(rank, place, phrases.called_alone(call)))
    sentence = phrases.called_too_much(now, pending, absent, present, culprits[0].why)
    return conclude(now, verdict.EXTRA, culprits, sentence)


def _either(now: Situation, absent: Sequence[int], present: Sequence[int], pending: PendingOperation) -> Verdict:
    """Neither side is a majority: one has skipped a call, or the other has made an extra one."""
    missing, extra = _skipped(now, absent, pending), _extra(now, present, absent, pending)
    sentence = phrases.one_or_other(now, pending, absent, present, extra.culprits[0].place)
    culprits = [*missing.culprits, *extra.culprits]
    return conclude(now, verdict.UNDECIDED, culprits, sentence, alternatives=(missing.sentence, extra.sentence))


def _peers(now: Situation, missing: Sequence[int], edges: Mapping[int, set[int]]) -> Verdict:
    """Ranks that others receive from or send to, and that are elsewhere."""
    waiting = sorted(rank for rank, others in edges.items() if others & set(missing))
    busy = all(now.evidence[rank].state in _BUSY_KINDS for rank in missing)
    named = all(
        wait.peer >= 0 for rank in waiting for wait in now.evidence[rank].waits if wait.kind in ("recv", "send")
    )
    certain = busy and named and len(missing) == 1
    culprits = [Culprit(rank, now.evidence[rank].place, phrases.state(now.evidence[rank])) for rank in missing]
    sentence = phrases.peers_elsewhere(now, waiting, missing, certain)
    if certain:
        kind = _BUSY_KINDS[now.evidence[missing[0]].state]
        return conclude(now, kind, culprits, sentence, likely=True)
    culprits += [Culprit(rank, now.evidence[rank].place, "may wait in vain") for rank in waiting]
    return conclude(now, verdict.UNDECIDED, culprits, sentence)


def settle(first: Mapping[int, Evidence], second: Mapping[int, Evidence]) -> dict[int, Evidence]:
    """Combine two samples, the second taken a moment after the first: a rank that moved between them is running."""
    return {rank: _settled(first.get(rank), after) for rank, after in second.items()}


def _settled(before: Evidence | None, after: Evidence) -> Evidence:
    if before is None or not before.answered:
        return after
    if not after.answered:
        # Its earlier report contains its rank in torch.distributed, and where it was.
        place = after.place or before.place
        return replace(before, state=after.state, why=after.why, place=place, waits=(), failure=None, answered=False)
    if after.state == WAITS:
        same = _waits(before) == _waits(after)
        return after if same else replace(after, state=RUNS)
    if after.state == RUNS:
        moved = before.ident != after.ident or before.ticks != after.ticks or before.history != after.history
        if moved:
            return after
        # The main thread may make no progress because another thread of the rank waits for other ranks.
        return replace(after, state=WAITS if after.waits and _waits(before) == _waits(after) else STANDS)
    return after


def _waits(evidence: Evidence) -> object:
    """Return what a rank waits for, in a form that can be compared between two samples."""
    return [
        (wait.kind, wait.operation.group, wait.operation.number, wait.operation.name, wait.peer)
        for wait in evidence.waits
    ]


def judge(evidence: Mapping[int, Evidence], mesh: str = "") -> Verdict:
    """Explain why these ranks wait, and for which ranks.

    Args:
        evidence: the settled evidence of each rank of the mesh.
        mesh: the name of the mesh.
    """
    now = Situation(_of_running_cells(evidence), mesh)
    waiting = now.waiting
    if not waiting:
        return _no_rank_waits(now)
    for pending in now.pending:
        found = mismatch(now, pending)
        if found is not None:
            return found
    edges = now.edges()
    ends = now.ends(waiting, edges)
    if ends:
        return of_ends(now, ends, edges)
    cycle = cycle_of(edges)
    return of_cycle(now, cycle) if cycle else _unexplained(now)


def _of_running_cells(evidence: Mapping[int, Evidence]) -> Mapping[int, Evidence]:
    """Return the evidence without failures of cells that ranks no longer run: these are not evidence."""
    cells = {each.cell for each in evidence.values() if each.cell}
    if not cells:
        return evidence
    return {
        rank: replace(each, failure=None)
        if each.failure is not None and each.failure.cell and each.failure.cell not in cells
        else each
        for rank, each in evidence.items()
    }


def _unexplained(now: Situation) -> Verdict:
    sentence = phrases.all_entered(now.pending[0]) if now.pending else phrases.waits_for_unknown(now)
    return conclude(now, verdict.UNDECIDED, [], sentence)


def _no_rank_waits(now: Situation) -> Verdict:
    apart = last_mismatch(now)
    peers = [rank for rank in now.evidence if failure_of_peer(now, rank)]
    if apart is not None and (now.in_state(DEAD) or peers):
        return apart
    for state in FATAL:
        ranks = now.in_state(state)
        if ranks:
            return gone(now, state, ranks)
    return conclude(now, verdict.NOTHING, [], phrases.no_rank_waits(now))
