"""Ranks that others wait for in vain: dead, stopped, failed, elsewhere in their code, finished. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from monarch_kernel.debugger.controller.hang import history, phrases, verdict
from monarch_kernel.debugger.controller.hang.conclusion import as_they_are, conclude
from monarch_kernel.debugger.controller.hang.mismatch import has_aborted
from monarch_kernel.debugger.controller.hang.situation import PendingOperation, Situation
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
)
from monarch_kernel.debugger.source_locations import SourceLocation

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
        if found.kind == history.SKIPPED:
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
        call = found.calls[0] if found.kind == history.EXTRA else pending.operation
        place = call.place if found.kind == history.EXTRA else None
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
