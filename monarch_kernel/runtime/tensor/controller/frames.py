"""Where operations are issued: frames are taken cheaply, and turned into text when an error needs them."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from monarch_kernel.display.locations import label_of

#: Code and instruction of each frame in turn, innermost first. Flat: many live, and a pair would be an object more.
Frames = list[Any]

_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_INSTALLED = tuple({path + os.sep for name, path in sysconfig.get_paths().items() if name.endswith("lib")})
#: How many frames of the user's are shown.
SHOWN = 6


def take(depth: int, limit: int) -> Frames:
    """The innermost `limit` frames of the caller that is `depth` calls above; where they are torch's, a user's, too."""
    frame: FrameType | None = sys._getframe(depth + 1)
    taken: Frames = []
    add = taken.append
    while frame is not None and limit:
        add(frame.f_code)
        add(frame.f_lasti)
        frame = frame.f_back
        limit -= 1
    if frame is not None and is_inside(taken[-2].co_filename):  # deep in torch's modules
        while frame is not None and is_inside(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            add(frame.f_code)
            add(frame.f_lasti)
    return taken


class ReplayedFrames(list[Any]):
    """Where a replay was called; `of` says where its operations were recorded."""

    def __init__(self, call: Frames, steps: Sequence[Frames]) -> None:
        super().__init__(call)
        self._steps = steps

    def of(self, steps: Sequence[int]) -> str:
        """The frames of a step (of a step, where one recording is in another), and those of the call."""
        recorded = self._steps[steps[0]]
        inner = recorded.of(steps[1:]) if steps[1:] and isinstance(recorded, ReplayedFrames) else text(recorded)
        return f"{inner}as recorded, and replayed at:\n{text(list(self))}"


def _pairs(frames: Frames) -> Iterator[tuple[CodeType, int]]:
    return zip(frames[::2], frames[1::2])


def is_inside(filename: str) -> bool:
    """Whether this is torch's code, or the engine's."""
    return filename.startswith(_INSIDE)


def line_of(code: CodeType, instruction: int) -> int:
    """The line of an instruction."""
    for begin, end, line in code.co_lines():
        if begin <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def innermost(frames: Frames | None) -> tuple[str, int, str]:
    """File, line and function of the user's innermost frame."""
    for code, instruction in _pairs(frames or []):
        if not is_inside(code.co_filename):
            return code.co_filename, line_of(code, instruction), code.co_name
    return "?", 0, "?"


def text(frames: Frames | None) -> str:
    """As in a traceback, with the user's frames only: none of what runs a cell or a script."""
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
    """The line of the program that runs now: that of a library where no frame is outside of the installed ones."""
    frame: Any = sys._getframe(1)
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
    """The user's line that runs now."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not is_inside(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "?", 0, "?"
