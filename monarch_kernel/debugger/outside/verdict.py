"""The hang verdict on processes that were read from outside, worded as far as that evidence goes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from monarch_kernel.debugger.controller.hang import phrases, verdict
from monarch_kernel.debugger.controller.hang.judge import judge
from monarch_kernel.debugger.controller.hang.verdict import Verdict
from monarch_kernel.debugger.model.evidence import STANDS, UNASKED, UNSEEN_GROUP, WAITS, Evidence
from monarch_kernel.debugger.source_locations import Place

#: Verdicts that rest on ranks being in the same process group.
_OF_GROUP = (verdict.ORDER, verdict.SHAPE, verdict.ROOT, verdict.EXTRA, verdict.CYCLE)


def verdict_from_outside(
    evidence: Mapping[int, Evidence],
    name: str,
    told: str,
    *,
    woken: Collection[int] = (),
    native: bool = False,
) -> Verdict:
    """Why these ranks wait, as it looks from outside: it is never certain.

    Args:
        evidence: the settled evidence of each rank.
        name: of the job.
        told: what the evidence is, as a sentence.
        woken: the ranks that have moved between the readings, although they may be at the same line.
        native: whether native frames were read.
    """
    found = judge(evidence, name)
    sentence = found.sentence
    notes = [told]
    waiting = [rank for rank, each in evidence.items() if each.state == WAITS]
    unseen = any(wait.operation.group == UNSEEN_GROUP for rank in waiting for wait in evidence[rank].waits)
    among_waiting = found.kind == verdict.UNDECIDED and set(found.ranks) <= set(waiting)
    states = phrases.states(evidence, waiting)
    if waiting and set(waiting) <= set(woken):
        read = [rank for rank, each in evidence.items() if each.state != UNASKED]
        sentence = (
            f"The job seems to make progress, as {phrases.ranks(waiting)} moved between the readings. At the second "
            f"one, {phrases.states(evidence, read)}."
        )
        return replace(found, kind=verdict.NOTHING, culprits=(), sentence=sentence, notes=(*notes, *found.notes))
    if unseen and (found.kind in _OF_GROUP or among_waiting):
        found = replace(found, kind=verdict.UNDECIDED)
        sentence = f"Undecided: {states}; which process groups these calls are of cannot be seen from outside."
    elif among_waiting and not found.culprits and len({_line(evidence[rank]) for rank in waiting}) > 1:
        sentence = f"Undecided: {states}; these are different lines, so one of the ranks may be a call behind."
    elif found.kind == verdict.NOTHING:
        sentence = sentence.replace("No rank waits", "No rank is seen to wait", 1)
        if not native and any(each.state == STANDS for each in evidence.values()):
            notes.append("A rank that makes no progress may wait in native code (NCCL, CUDA); --native shows where.")
    elif found.decided:
        sentence = f"It seems that {sentence[:1].lower()}{sentence[1:]}"
    if unseen and found.decided:
        notes.append("Their process group cannot be seen from outside; that of all ranks is assumed.")
    return replace(found, sentence=sentence, likely=True, notes=(*notes, *found.notes))


def _line(each: Evidence) -> tuple[str, int] | None:
    place: Place | None = each.waits[0].place if each.waits else each.place
    return None if place is None else (place.file, place.line)
