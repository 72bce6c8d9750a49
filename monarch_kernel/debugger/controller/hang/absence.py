"""Ranks that others wait for and that are not there: dead, stopped, failed, elsewhere in their code, finished. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch_kernel.debugger.controller.hang import history, phrases, verdict
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
    WAITS,
    Evidence,
)
from monarch_kernel.debugger.source_locations import Place

#: States of ranks that will never arrive by themselves, the surest cause first.
FATAL = (DEAD, SILENT, PAUSED)


def of_ends(now: Situation, ends: set[int], edges: Mapping[int, set[int]]) -> Verdict:
    """Why those ranks that all the others wait for do not come.

    Args:
        now: the situation.
        ends: these ranks, which wait for nobody themselves.
        edges: whom each rank waits for.
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
        return missing(now, verdict.FAILED, own)
    unknown = by_state.get(LATE, []) + by_state.get(UNASKED, [])
    if unknown:
        return _not_asked(now, unknown)
    if failed:
        return _failed_of_peers(now, failed)
    busy = sorted(rank for state in (LOADS, RUNS, STANDS) for rank in by_state.get(state, ()))
    done = by_state.get(IDLE, [])
    return _absent(now, done, busy, edges)


def _has_failed(now: Situation, rank: int) -> bool:
    """Whether an exception has ended what the ranks that wait still run."""
    failure = now.evidence[rank].failure
    if failure is None:
        return False
    roots = {each.stack[0].file for each in now.evidence.values() if each.state == WAITS and each.stack}
    return not roots or not failure.root or failure.root in roots


def failure_of_peer(now: Situation, rank: int) -> bool:
    """Whether a rank has failed only because another one was gone, or did not come."""
    failure = now.evidence[rank].failure
    return failure is not None and failure.of_peer


def missing(now: Situation, state: str, ranks: Sequence[int]) -> Verdict:
    """Ranks that will not come, for a reason that is certain."""
    kind = {DEAD: verdict.DEAD, SILENT: verdict.SILENT, PAUSED: verdict.PAUSED}.get(state, verdict.FAILED)
    culprits: list[Culprit] = []
    said: list[str] = []
    alike: dict[str, list[int]] = {}
    for rank in ranks:
        each = now.evidence[rank]
        place = each.failure.place if kind == verdict.FAILED and each.failure is not None else each.place
        culprits.append(Culprit(rank, place, phrases.state(each)))
        alike.setdefault(phrases.state(each), []).append(rank)
    said += [phrases.doing(who, why) for why, who in alike.items()]
    waits = now.who_waits(set(ranks))
    more = [rank for rank, each in now.evidence.items() if each.failure is not None and each.failure.of_peer]
    after = f"; {phrases.ranks(more)} failed because of that" if more and kind == verdict.DEAD else ""
    return now.verdict(kind, culprits, f"{phrases.capital(phrases.joined(said))}; {waits}{after}.")


def gone(now: Situation, state: str, ranks: Sequence[int]) -> Verdict:
    """Ranks that will never come: dead, silent, or stopped by a debugger."""
    crashed = [rank for rank in ranks if _has_crashed(now.evidence[rank])]
    others = [rank for rank, each in now.evidence.items() if each.state == WAITS or failure_of_peer(now, rank)]
    if crashed and len(crashed) < len(ranks):
        # gloo may crash where its peer is gone, so these say nothing beside one that was killed.
        return missing(now, state, [rank for rank in ranks if rank not in crashed])
    if len(crashed) > 1 or (others and any(has_aborted(now.evidence[rank]) for rank in crashed) and len(others) == 1):
        return _crashed(now, crashed, others if len(others) == 1 else [])
    # One has crashed. Two or more others have called the same, or that would have been said: so it differed from them.
    return missing(now, state, ranks)


def _has_crashed(each: Evidence) -> bool:
    return each.state == DEAD and any(signal in each.why for signal in ("SIGABRT", "SIGSEGV", "SIGBUS"))


def _crashed(now: Situation, crashed: Sequence[int], others: Sequence[int]) -> Verdict:
    """Ranks that gloo may have ended, because one of them or another one did not call the same."""
    culprits = [Culprit(rank, None, phrases.state(now.evidence[rank])) for rank in crashed]
    culprits += [
        Culprit(rank, _failure_place(now, rank) or now.evidence[rank].place, phrases.state(now.evidence[rank]))
        for rank in others
    ]
    said = [phrases.states(now.evidence, crashed)] + ([phrases.states(now.evidence, others)] if others else [])
    sentence = (
        f"Undecided: {phrases.joined(said)}; gloo ends a process that receives more than it expects, and its peers may "
        "crash then, too, so one of these may have called something else than the others, or with other sizes."
    )
    return now.verdict(verdict.UNDECIDED, culprits, sentence)


def _not_asked(now: Situation, unknown: Sequence[int]) -> Verdict:
    culprits = [Culprit(rank, None, phrases.state(now.evidence[rank])) for rank in unknown]
    sentence = f"Undecided: {phrases.states(now.evidence, unknown)}; {now.who_waits(set(unknown))}."
    return now.verdict(verdict.UNDECIDED, culprits, sentence)


def _failed_of_peers(now: Situation, failed: Sequence[int]) -> Verdict:
    culprits = [Culprit(rank, _failure_place(now, rank), phrases.state(now.evidence[rank])) for rank in failed]
    sentence = (
        f"Undecided: {phrases.states(now.evidence, failed)}, which says that another rank was gone or did not "
        f"come, but not which; {now.who_waits(set(failed))}."
    )
    return now.verdict(verdict.UNDECIDED, culprits, sentence)


def _failure_place(now: Situation, rank: int) -> Place | None:
    failure = now.evidence[rank].failure
    return failure.place if failure is not None else None


def _absent(now: Situation, done: Sequence[int], busy: Sequence[int], edges: Mapping[int, set[int]]) -> Verdict:
    """Ranks that have finished, or are elsewhere in their code, while others wait for them."""
    missing = {*done, *busy}
    meeting = next((each for each in now.meetings if each.absent & missing and each.waiting), None)
    if meeting is None:
        return _peers(now, sorted(missing), edges)
    absent = sorted(meeting.absent & missing)
    present = sorted(meeting.entered)
    unknown = len(meeting.absent - missing) + meeting.outside
    if len(absent) + unknown < len(present):
        return _skipped(now, absent, present, meeting)
    if all(rank in busy for rank in absent) and all(_will_come(now, rank, meeting) for rank in absent):
        return _skipped(now, absent, present, meeting)
    if not set(absent) & set(busy) and len(present) + unknown < len(absent):
        return _extra(now, present, absent, meeting)
    return _either(now, absent, present, meeting)


def _will_come(now: Situation, rank: int, meeting: PendingOperation) -> bool:
    """Whether a rank that is elsewhere has called from the line where others wait before, or will come by there."""
    call = meeting.call
    if call.place is None:
        return False
    line = (call.place.file, call.place.line)
    for earlier in now.evidence[rank].history.get(meeting.group.name, ()):
        if earlier.place is not None and (earlier.place.file, earlier.place.line) == line:
            return True
    theirs = now.evidence[next(iter(meeting.waiting))].stack
    for mine, other in zip(now.evidence[rank].stack, theirs, strict=False):
        if (mine.file, mine.name) != (other.file, other.name):
            return False
        if mine.line != other.line:
            return mine.line < other.line
    return False


def _skipped(now: Situation, absent: Sequence[int], present: Sequence[int], meeting: PendingOperation) -> Verdict:
    """The few who are not there are to blame."""
    culprits: list[Culprit] = []
    alike: dict[tuple[str, str], list[int]] = {}
    waiting = next(iter(meeting.waiting))
    certain = True
    for rank in absent:
        each = now.evidence[rank]
        found = now.parting(rank, waiting, meeting.group.name)
        kind = {LOADS: verdict.LOADER, RUNS: verdict.RUNNING, STANDS: verdict.STANDING}.get(each.state, "")
        place = each.place
        if found.kind == history.SKIPPED:
            kind, place = verdict.SKIPPED, found.calls[0].place
            text = f"{phrases.left_out(found.calls)} and {phrases.state(each)}"
        elif kind:
            text = f"has not entered it: it {phrases.state(each)}"
        else:
            kind, place = verdict.SKIPPED, meeting.call.place
            text = f"never entered it and {phrases.state(each)}"
        certain = certain and kind in (verdict.SKIPPED, verdict.LOADER)
        culprits.append(Culprit(rank, place, text))
        alike.setdefault((kind, text), []).append(rank)
    where = phrases.waits_in(sorted(meeting.waiting), meeting.call, meeting.group)
    said = phrases.joined([phrases.doing(who, text) for (_, text), who in alike.items()])
    kinds = [kind for kind, _ in alike]
    return now.verdict(
        kinds[0] if len(set(kinds)) == 1 else verdict.SKIPPED,
        culprits,
        f"{phrases.capital(where)}; {said}.",
        likely=not certain,
    )


def _extra(now: Situation, present: Sequence[int], absent: Sequence[int], meeting: PendingOperation) -> Verdict:
    """The few who are there are to blame: the others have finished without it."""
    culprits: list[Culprit] = []
    for rank in present:
        found = now.parting(rank, absent[0], meeting.group.name)
        place = found.calls[0].place if found.kind == history.EXTRA else None
        if place is None:
            own = now.evidence[rank].at(meeting.group.name, meeting.number)
            place = own.place if own is not None else meeting.call.place
        call = found.calls[0] if found.kind == history.EXTRA else meeting.call
        culprits.append(Culprit(rank, place, f"called {phrases.call(call)}, which no other rank called"))
    call_text = culprits[0].why
    where = phrases.waits_in(sorted(meeting.waiting), meeting.call, meeting.group)
    others = f"{phrases.states(now.evidence, absent)} without it"
    sentence = f"{phrases.capital(where)}, and {others}: {phrases.ranks(present)} {call_text}."
    return now.verdict(verdict.EXTRA, culprits, sentence)


def _either(now: Situation, absent: Sequence[int], present: Sequence[int], meeting: PendingOperation) -> Verdict:
    """Neither side is a majority: one has left something out, or the other has done too much."""
    missing, extra = _skipped(now, absent, present, meeting), _extra(now, present, absent, meeting)
    where = phrases.waits_in(sorted(meeting.waiting), meeting.call, meeting.group)
    rest = phrases.states(now.evidence, absent)
    sentence = (
        f"Undecided: {where}, while {rest}; either {phrases.ranks(absent)} left it out or will come, or "
        f"{phrases.ranks(present)} called one too many{phrases.at(extra.culprits[0].place)}."
    )
    return now.verdict(
        verdict.UNDECIDED,
        [*missing.culprits, *extra.culprits],
        sentence,
        alternatives=(missing.sentence, extra.sentence),
    )


def _peers(now: Situation, missing: Sequence[int], edges: Mapping[int, set[int]]) -> Verdict:
    """Ranks that others receive from or send to, and that are elsewhere."""
    culprits: list[Culprit] = []
    waiting = sorted(rank for rank, others in edges.items() if others & set(missing))
    certain = all(now.evidence[rank].state in (LOADS, RUNS, STANDS) for rank in missing)
    named = all(
        wait.peer >= 0 for rank in waiting for wait in now.evidence[rank].waits if wait.kind in ("recv", "send")
    )
    for rank in missing:
        culprits.append(Culprit(rank, now.evidence[rank].place, phrases.state(now.evidence[rank])))
    said = phrases.states(now.evidence, missing)
    doing = phrases.states(now.evidence, waiting)
    if certain and named and len(missing) == 1:
        kind = {LOADS: verdict.LOADER, RUNS: verdict.RUNNING}.get(now.evidence[missing[0]].state, verdict.STANDING)
        return now.verdict(kind, culprits, f"{phrases.capital(doing)}; {said}.", likely=True)
    culprits += [Culprit(rank, now.evidence[rank].place, "may wait for nothing") for rank in waiting]
    return now.verdict(verdict.UNDECIDED, culprits, f"Undecided: {doing}, but {said}.")
