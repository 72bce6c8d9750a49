"""Record where operations are issued. Frames are recorded cheaply, and formatted only for an error."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from monarch_kernel.display.quantities import label_of

#: Code and instruction of each frame in turn, innermost first. The list is flat because many are alive, and a pair
#: would be an extra object.
Frames = list[Any]

_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_INSTALLED = tuple({path + os.sep for name, path in sysconfig.get_paths().items() if name.endswith("lib")})
#: The number of user frames shown.
SHOWN = 6


def take(depth: int, limit: int) -> Frames:
    """Record the innermost `limit` frames above `depth` callers. If all belong to torch, include a user frame."""
    frame: FrameType | None = sys._getframe(depth + 1)
    taken: Frames = []
    add = taken.append
    while frame is not None and limit:
        add(frame.f_code)
        add(frame.f_lasti)
        frame = frame.f_back
        limit -= 1
    if frame is not None and is_inside(taken[-2].co_filename):  # deep inside torch's modules
        while frame is not None and is_inside(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            add(frame.f_code)
            add(frame.f_lasti)
    return taken


class ReplayedFrames(list[Any]):
    """The frames of a replay's call. `of` adds where its operations were recorded."""

    def __init__(self, call: Frames, steps: Sequence[Frames]) -> None:
        super().__init__(call)
        self._steps = steps

    def of(self, steps: Sequence[int]) -> str:
        """Return the frames of a step and those of the call. Nested recordings have nested steps."""
        recorded = self._steps[steps[0]]
        inner = recorded.of(steps[1:]) if steps[1:] and isinstance(recorded, ReplayedFrames) else text(recorded)
        return f"{inner}as recorded, and replayed at:\n{text(list(self))}"


def _pairs(frames: Frames) -> Iterator[tuple[CodeType, int]]:
    return zip(frames[::2], frames[1::2])


def is_inside(filename: str) -> bool:
    """Return whether a file belongs to torch or to the engine."""
    return filename.startswith(_INSIDE)


def line_of(code: CodeType, instruction: int) -> int:
    """Return the line of an instruction."""
    for begin, end, line in code.co_lines():
        if begin <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def innermost(frames: Frames | None) -> tuple[str, int, str]:
    """Return the file, line and function of the innermost user frame."""
    for code, instruction in _pairs(frames or []):
        if not is_inside(code.co_filename):
            return code.co_filename, line_of(code, instruction), code.co_name
    return "?", 0, "?"


def text(frames: Frames | None) -> str:
    """Format the user frames like a traceback, without the frames that run a cell or a script."""
    if frames is None:
        return "  (too long ago: the place is no longer kept)\n"
    lines: list[str] = []
    for code, instruction in _pairs(frames):
        if is_inside(code.co_filename):
            continue
        line = line_of(code, instruction)
        source = linecache.getline(code.co_filename, line).strip()
        shown = f"    {source}\n" if source else ""
        named = label_of(code.co_filename) or f'File "{code.co_filename}"'
        lines.append(f"  {named}, line {line}, in {code.co_name}\n{shown}")
        if len(lines) == SHOWN or code.co_name == "<module>":
            break
    return "".join(reversed(lines)) or "  (inside torch)\n"


def program_line() -> tuple[str, int]:
    """Return the current line of the program. If all frames are in installed libraries, return a library's line."""
    frame = sys._getframe(1)
    place = "?", 0
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_inside(file):
            if not file.startswith(_INSTALLED):
                return file, frame.f_lineno
            if not place[1]:
                place = file, frame.f_lineno
        frame = frame.f_back
    return place


def here() -> tuple[str, int, str]:
    """Return the file, line and function of the current user line."""
    frame = sys._getframe(1)
    while frame is not None:
        if not is_inside(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "?", 0, "?"
