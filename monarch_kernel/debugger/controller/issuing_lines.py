"""Find the lines of this controller that issued the tensor operations that ranks run."""

from __future__ import annotations

from dataclasses import replace

from monarch_kernel.debugger.model.evidence import Evidence
from monarch_kernel.debugger.model.stops import Stack, StackFrame, StackSnapshot
from monarch_kernel.debugger.source_locations import SourceLocation, kind_of
from monarch_kernel.display.quantities import source_line
from monarch_kernel.introspection import issued_at


def issued_here(snapshot: StackSnapshot) -> StackSnapshot:
    """Return a snapshot in which the stack of each operation begins with the line that issued it."""
    if all(stack.issued is None for stack in snapshot.stacks):
        return snapshot
    return snapshot._replace(stacks=tuple(map(_with_line, snapshot.stacks)))


def evidence_of_issued(evidence: Evidence) -> Evidence:
    """Return evidence in which an operation is at the line that issued it, if the rank itself runs no user code."""
    place = None if evidence.issued is None else _place(*evidence.issued)
    if place is None:
        return evidence
    waits = tuple(
        replace(
            wait,
            place=wait.place or place,
            operation=replace(wait.operation, place=place if _is_start(wait.operation.place) else wait.operation.place),
        )
        for wait in evidence.waits
    )
    return replace(evidence, waits=waits, place=evidence.place or place, stack=(place, *evidence.stack))


def _is_start(place: SourceLocation | None) -> bool:
    """Return whether no user code called a collective: PyTorch's record then has the outermost frame of the process."""
    return place is None or place.file == "<string>"


def _with_line(stack: Stack) -> Stack:
    place = None if stack.issued is None else _place(*stack.issued)
    if place is None:
        return stack
    return stack._replace(frames=(StackFrame(place, source_line(place.file, place.line)), *stack.frames))


def _place(engine: str, record: int) -> SourceLocation | None:
    found = issued_at(engine, record)
    return None if found is None else SourceLocation(*found, kind_of(found[0]))
