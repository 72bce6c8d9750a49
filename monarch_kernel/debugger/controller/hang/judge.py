"""Derive a verdict from the evidence of ranks. Pure: takes evidence, returns a `Verdict`, possibly undecided.

Ranks wait for those of their process group that have not entered the same collective. Following these waits from rank
to rank leads to ranks that wait for none: they are dead, stopped, failed, elsewhere in their code, or finished
(`absence`). If it leads into a cycle, ranks have entered different collectives (`mismatch`). A clear majority decides
which of two sides is wrong; without one, the verdict is undecided. `phrases` has the wording.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from monarch_kernel.debugger.controller.hang import phrases, verdict
from monarch_kernel.debugger.controller.hang.absence import FATAL, failure_of_peer, gone, of_ends
from monarch_kernel.debugger.controller.hang.conclusion import conclude
from monarch_kernel.debugger.controller.hang.mismatch import cycle_of, last_mismatch, mismatch, of_cycle
from monarch_kernel.debugger.controller.hang.situation import Situation
from monarch_kernel.debugger.controller.hang.verdict import Verdict
from monarch_kernel.debugger.model.evidence import DEAD, RUNS, STANDS, WAITS, Evidence


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
