"""From what ranks tell to a verdict. Pure: evidence goes in, a `Verdict` comes out, or `undecided` with its reasons.

Ranks wait for those of their process group that have not entered the same collective. Following that from rank to rank
leads to those that wait for nobody: dead, stopped, failed, elsewhere in their code, or finished. Where it leads in a
circle, ranks have entered different collectives. Who of two sides is wrong is decided by a clear majority, and
otherwise not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from monarch_kernel.debugger.controller.hang import phrases, verdict
from monarch_kernel.debugger.controller.hang.absence import FATAL, failure_of_peer, gone, of_ends
from monarch_kernel.debugger.controller.hang.mismatch import circle_of, last_mismatch, mismatch, of_circle
from monarch_kernel.debugger.controller.hang.situation import Situation
from monarch_kernel.debugger.controller.hang.verdict import Verdict
from monarch_kernel.debugger.model.evidence import DEAD, LATE, LOADS, RUNS, STANDS, WAITS, Evidence


def settle(first: Mapping[int, Evidence], second: Mapping[int, Evidence]) -> dict[int, Evidence]:
    """One account of two looks, the second a moment after the first: what moved between them runs, the rest stands."""
    return {rank: _settled(first.get(rank), after) for rank, after in second.items()}


def _settled(before: Evidence | None, after: Evidence) -> Evidence:
    if before is None or not before.answered:
        return after
    if not after.answered:
        # What it said before tells which rank of torch.distributed it is, and where it was.
        place = after.place or before.place
        return replace(before, state=after.state, why=after.why, place=place, waits=(), failure=None, answered=False)
    if after.state == WAITS:
        same = _calls(before) == _calls(after)
        return after if same else replace(after, state=RUNS)
    if after.state == RUNS:
        moved = before.ident != after.ident or before.ticks != after.ticks or before.history != after.history
        if moved:
            return after
        # What its own thread stands for may be another thread of it, which waits for other ranks.
        return replace(after, state=WAITS if after.waits and _calls(before) == _calls(after) else STANDS)
    return after


def _calls(evidence: Evidence) -> object:
    return [(wait.kind, wait.call.group, wait.call.number, wait.call.name, wait.peer) for wait in evidence.waits]


def judge(evidence: Mapping[int, Evidence], mesh: str = "") -> Verdict:
    """Why these ranks wait, and for whom.

    Args:
        evidence: of each rank of the mesh, settled.
        mesh: its name.
    """
    now = Situation(evidence, mesh)
    waiting = [rank for rank, each in now.evidence.items() if each.state == WAITS]
    if not waiting:
        return _nobody_waits(now)
    for meeting in now.meetings:
        found = mismatch(now, meeting)
        if found is not None:
            return found
    edges = now.edges()
    ends = now.ends(waiting, edges)
    if ends:
        return of_ends(now, ends, edges)
    circle = circle_of(edges)
    return of_circle(now, circle) if circle else _unexplained(now)


def _unexplained(now: Situation) -> Verdict:
    if now.meetings:
        meeting = now.meetings[0]
        where = phrases.waits_in(sorted(meeting.waiting), meeting.call, meeting.group)
        more = f", and {meeting.outside} of its ranks are not in this mesh" if meeting.outside else ""
        sentence = f"Undecided: {where}, which all ranks that were asked have entered alike{more}."
    else:
        waiting = [rank for rank, each in now.evidence.items() if each.state == WAITS]
        doing = phrases.states(now.evidence, waiting)
        sentence = f"Undecided: {doing}, and for whom is not known."
    return now.verdict(verdict.UNDECIDED, [], sentence)


def _nobody_waits(now: Situation) -> Verdict:
    dead = [rank for rank, each in now.evidence.items() if each.state == DEAD]
    apart = last_mismatch(now)
    peers = [rank for rank in now.evidence if failure_of_peer(now, rank)]
    if apart is not None and (dead or peers):
        return apart
    for state in FATAL:
        ranks = [rank for rank, each in now.evidence.items() if each.state == state]
        if ranks:
            return gone(now, state, ranks)
    said = "No rank waits for another one"
    busy = [rank for rank, each in now.evidence.items() if each.state in (RUNS, STANDS, LOADS)]
    if busy:
        said += f": {phrases.states(now.evidence, busy)}"
    late = [rank for rank, each in now.evidence.items() if each.state == LATE]
    if late:
        said += f"; {phrases.states(now.evidence, late)}"
    return now.verdict(verdict.NOTHING, [], f"{said}.")
