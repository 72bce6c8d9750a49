"""Hide traceback frames of this package, and frames that were only waiting when an interrupt arrived."""

from __future__ import annotations

import asyncio
import os
import selectors
from types import TracebackType

from monarch_kernel import programs
from monarch_kernel.thread_frames import without_last_frames

_PACKAGE = programs.PACKAGE + os.sep
#: Files whose frames are hidden if an interrupt hits waiting code.
WAITING = (os.path.dirname(asyncio.__file__) + os.sep, selectors.__file__)
# debugpy and its pydevd trace the kernel while the debugger of JupyterLab is on.
_DEBUGGERS = (f"{os.sep}debugpy{os.sep}", f"{os.sep}pydevd", f"{os.sep}bdb.py", f"{os.sep}pdb.py")


def cut(
    traceback: TracebackType | None, *, interrupt: bool = False, within: tuple[str, ...] = ()
) -> TracebackType | None:
    """Return the traceback up to the last frame outside this package; the whole traceback if there is none.

    Args:
        interrupt: the traceback belongs to a KeyboardInterrupt; also hide trailing frames that wait or trace.
        within: also hide trailing frames in files whose paths contain one of these.
    """
    return without_last_frames(traceback, lambda file: _hidden(file, interrupt, within)) or traceback


def _hidden(file: str, interrupt: bool, within: tuple[str, ...]) -> bool:
    if file.startswith(_PACKAGE) or any(part in file for part in within):
        return True
    return interrupt and (file.startswith(WAITING) or any(part in file for part in _DEBUGGERS))
