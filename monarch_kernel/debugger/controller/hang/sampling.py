"""Sample the ranks of a mesh twice, and judge the evidence."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from monarch_kernel.actor import ActorMesh, ProcMesh
from monarch_kernel.debugger.controller.hang import phrases
from monarch_kernel.debugger.controller.hang.judge import judge, settle
from monarch_kernel.debugger.controller.hang.verdict import Verdict
from monarch_kernel.debugger.controller.query import ask, stops_of
from monarch_kernel.debugger.controller.stacks.gather import evidence_of_issued
from monarch_kernel.debugger.controller.stacks.pyspy import in_collective, threads_of, user_location
from monarch_kernel.debugger.events import evidence_at_client, shown_frame
from monarch_kernel.debugger.model.evidence import DEAD, LATE, PAUSED, SILENT, STANDS, UNASKED, WAITS, Evidence
from monarch_kernel.debugger.rank.hang import collect
from monarch_kernel.debugger.source_locations import SourceLocation
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import StackRead, Whole, deaths_of, whole_of

#: The time between the two samples (seconds).
APART = 0.4
#: A rank that has not answered after this long is also read from outside (seconds).
PROMPT = 1.0
#: How many collectives ranks report at first, and how many if those do not reach back to the point of divergence.
DEPTH, ALL = 128, 2000


def sample_and_judge(mesh: ProcMesh | ActorMesh[object], ranks: Iterable[int] | None, timeout: float) -> Verdict:
    """See `hang`."""
    deadline = time.monotonic() + timeout
    whole = whole_of(mesh)
    chosen = None if ranks is None else sorted(set(ranks))
    first = _sample(mesh, chosen, DEPTH, deadline)
    answered = [rank for rank, each in first.items() if each.answered]
    time.sleep(APART)
    second = {**first, **(_sample(mesh, answered, DEPTH, deadline) if answered else {})}
    if _reaches_too_short(second.values()):
        second.update(_sample(mesh, answered, ALL, deadline + timeout))
    found = settle(first, second)
    for rank in range(len(whole.ranks)):
        found.setdefault(rank, Evidence(rank, UNASKED, answered=False))
    return judge(found, whole.procs.name)


def _sample(
    mesh: ProcMesh | ActorMesh[object], ranks: Sequence[int] | None, depth: int, deadline: float
) -> dict[int, Evidence]:
    """Collect what each of these ranks reports, or what others report about it."""
    whole = whole_of(mesh)
    found: dict[int, Evidence] = {}
    missing: Sequence[int] | None = ranks
    outside: dict[int, Evidence] = {}
    while True:
        left = max(0.05, deadline - time.monotonic())
        answers = ask(mesh, collect, depth, ranks=missing, timeout=min(PROMPT, left))
        for rank, each in answers.values.items():
            found[rank] = replace(
                evidence_of_issued(evidence_at_client(each)), rank=rank
            )  # its rank in the mesh that was asked, which may be a slice
        for rank, why in answers.dead.items():
            found[rank] = Evidence(rank, DEAD, why, answered=False, signal=_signal_of(mesh, rank))
        for rank in answers.errors:
            error = answers.error_of(rank).strip()
            found[rank] = Evidence(rank, LATE, f"its debugger failed: {error}", answered=False)
        unsure = [rank for rank in answers.late if rank not in outside]
        outside.update(_from_outside(mesh, unsure))
        missing = [rank for rank in answers.late if outside[rank].state == LATE]
        found.update({rank: _as_it_stands(whole, outside[rank]) for rank in answers.late})
        if not missing or time.monotonic() >= deadline:
            return found


def _as_it_stands(whole: Whole, evidence: Evidence) -> Evidence:
    """Add the known stop of a rank that does not answer: it may have reported that it is stopped in the debugger."""
    at = stops_of(whole).get(evidence.rank) if evidence.state == LATE else None
    frame = None if at is None else shown_frame(at.stop.frames)
    if frame is None:
        return evidence
    return replace(evidence, state=PAUSED, place=SourceLocation(frame.file, frame.line, frame.name))


def _signal_of(mesh: ProcMesh | ActorMesh[object], rank: int) -> int:
    """Return the signal that ended a rank; 0 if it is unknown, or there was none."""
    whole = whole_of(mesh)
    death = deaths_of(whole.procs).get(whole.ranks[rank])
    return 0 if death is None else death.signal


def _from_outside(mesh: ProcMesh | ActorMesh[object], ranks: Sequence[int]) -> dict[int, Evidence]:
    """Return evidence about ranks that did not answer, as read by their host agents."""
    if not ranks:
        return {}
    whole = whole_of(mesh)
    reads = tool_runtime().stacks_from_outside(whole.procs, [whole.ranks[rank] for rank in ranks], timeout=2.0)
    return {rank: _evidence_of(rank, reads[whole.ranks[rank]]) for rank in ranks}


def _evidence_of(rank: int, read: StackRead) -> Evidence:
    try:
        threads = threads_of(read.dump) if read.dump else []
    except ValueError:
        threads = []
    place = next((place for place in map(user_location, threads) if place is not None), None)
    if read.why:
        return Evidence(rank, SILENT, read.why, place=place, answered=False)
    if not any(map(in_collective, threads)):
        holder = next((thread for thread in threads if thread.get("owns_gil")), None)
        held = user_location(holder) if holder is not None else None
        if held is not None:
            return Evidence(rank, STANDS, "it holds the interpreter lock", place=held, answered=False)
    return Evidence(rank, LATE, read.error, place=place, answered=False)


def _reaches_too_short(evidence: Iterable[Evidence]) -> bool:
    """Return whether ranks wait, and their histories already differ at the first recorded call."""
    found = list(evidence)
    if not any(each.state == WAITS for each in found):
        return False
    reference: dict[str, Evidence] = {}
    for each in found:
        for name, calls in each.history.items():
            other = reference.setdefault(name, each)
            if len(calls) >= DEPTH and phrases.starts_apart(calls, other.history[name]):
                return True
    return False
