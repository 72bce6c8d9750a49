"""Frames that a traceback is shown without: of our own package, and of what merely waits when an interrupt comes."""

from __future__ import annotations

import asyncio
import os
import selectors
from types import TracebackType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: Files below which an interrupt finds code that waits, and nobody looks for a bug.
WAITING = (os.path.dirname(asyncio.__file__) + os.sep, selectors.__file__)
# debugpy, with the pydevd that it brings, traces the kernel when JupyterLab's debugger is on.
_DEBUGGERS = (f"{os.sep}debugpy{os.sep}", f"{os.sep}pydevd", f"{os.sep}bdb.py", f"{os.sep}pdb.py")


def cut(traceback: TracebackType | None, *, interrupt: bool = False) -> TracebackType | None:
    """The traceback up to the last frame that is not this package's; all of it if every frame is.

    Args:
        interrupt: it is of a KeyboardInterrupt: also without what waited, or traced, at its end.
    """
    frames: list[TracebackType] = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    shown = frames
    while shown and _hidden(shown[-1].tb_frame.f_code.co_filename, interrupt):
        shown = shown[:-1]
    made: TracebackType | None = None
    for frame in reversed(shown or frames):
        made = TracebackType(made, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return made


def _hidden(file: str, interrupt: bool) -> bool:
    if file.startswith(_PACKAGE):
        return True
    return interrupt and (file.startswith(WAITING) or any(part in file for part in _DEBUGGERS))
