"""Trim stacks: remove the frames that lead to user code, and those of a debugger. Pure.

The same rules apply to reports of ranks and to dumps of py-spy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from monarch_kernel.debugger.model.stacks import (
    CODE,
    ENDPOINT,
    INNER_FRAMES,
    NATIVE,
    OPERATION,
    OUTER_FRAMES,
    TASK,
    StackFrame,
)
from monarch_kernel.debugger.source_locations import CELL_RUNNER, ENDPOINT_RUNNERS, RUNTIME, USER, is_debugger

_NUMBERED = re.compile(r"(?:[-_]\d+)+$")
_THREAD = re.compile(r"Thread-\d+ \((?P<target>.*)\)$")


def thread_name(name: str) -> str:
    """Return a thread's name without the part that differs between ranks: `Thread-3 (load)` is `load`."""
    match = _THREAD.match(name)
    if match:
        return match["target"] or "Thread"
    if name.startswith("Dummy-"):
        return "a thread of native code"
    return _NUMBERED.sub("", name) or name or "a thread without a name"


def is_ours(name: str) -> bool:
    """Whether a thread belongs to the runtime."""
    return name.startswith("monarch-")


def kind_by_frames(frames: Sequence[StackFrame]) -> str:
    """Return whether a stack (the outermost frame first) runs a cell, an endpoint, or neither (``""``)."""
    ours = [frame.place.file for frame in frames if frame.place.kind == RUNTIME]
    if any(file.endswith(CELL_RUNNER) for file in ours):
        return CODE
    return ENDPOINT if any(file.endswith(ENDPOINT_RUNNERS) for file in ours) else ""


def has_user_code(frames: Sequence[StackFrame]) -> bool:
    """Return whether a stack contains user code."""
    return any(frame.user for frame in frames)


def is_stopped(frames: Sequence[StackFrame]) -> bool:
    """Return whether the debugger of this package has stopped this stack."""
    return _cut_stop(frames) != len(frames)


def trimmed(frames: Sequence[StackFrame], kind: str) -> tuple[StackFrame, ...]:
    """Return the part of a stack (outermost frame first) that its owner runs; the whole stack if there is none."""
    shown = list(frames[: _cut_stop(frames)])
    first = next((at for at, frame in enumerate(shown) if frame.user), len(shown))
    if kind == OPERATION:  # perhaps none of it is Python
        inside = [at for at, frame in enumerate(shown) if frame.place.kind == RUNTIME]
        return tuple(shown[min(first, inside[-1] + 1 if inside else 0) :])
    if kind == ENDPOINT:
        begin = _after_callers(shown[:first]) or first  # frames of another runtime are below user code
    elif kind == TASK:
        begin = next((at for at, frame in enumerate(shown) if frame.place.kind not in (RUNTIME, NATIVE)), 0)
    else:
        begin = first
    return tuple(shown[begin:]) or tuple(shown)


def folded(frames: Sequence[StackFrame]) -> tuple[StackFrame, ...]:
    """Merge equal neighbours of a stack into one frame, and remove the middle of a very deep stack."""
    kept: list[StackFrame] = []
    for frame in frames:
        last = kept[-1] if kept else None
        if last is not None and last.place == frame.place:
            kept[-1] = frame._replace(times=last.times + frame.times)
        else:
            kept.append(frame)
    left_out = len(kept) - OUTER_FRAMES - INNER_FRAMES
    if left_out > 0:
        inner = kept[-INNER_FRAMES:]
        kept = [*kept[:OUTER_FRAMES], inner[0]._replace(left_out=left_out), *inner[1:]]
    return tuple(kept)


def _after_callers(frames: Sequence[StackFrame]) -> int:
    """Return the index where the endpoint begins: after the innermost frame of the runtime that calls endpoints."""
    begin = 0
    for at, frame in enumerate(frames):
        if frame.place.kind == RUNTIME and frame.place.file.endswith(ENDPOINT_RUNNERS):
            begin = at + 1
    return begin


def _cut_stop(frames: Sequence[StackFrame]) -> int:
    """Return the index where the debugger has taken over from user code; the length if it has not."""
    user = False
    for at, frame in enumerate(frames):
        place = frame.place
        if place.kind == USER:
            user = True
        elif user and is_debugger(place.file):
            while frames[at - 1].place.kind == RUNTIME:  # the function that `breakpoint()` calls
                at -= 1
            return at
    return len(frames)
