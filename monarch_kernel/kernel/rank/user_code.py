"""Find user code on a rank: where a thread is in it, and its faults without frames of this package."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from monarch_kernel import programs
from monarch_kernel.introspection import failed_by_peer
from monarch_kernel.kernel.traceback_frames import WAITING
from monarch_kernel.protocol.faults import Fault, capture
from monarch_kernel.spmd import interrupt_first
from monarch_kernel.thread_frames import current_frames

_PACKAGE = programs.PACKAGE + os.sep
_KERNEL = os.path.join(_PACKAGE, "kernel", "")
# Folders without user code: the location of a rank is the innermost line outside these folders.
_FOREIGN = tuple(
    {
        _PACKAGE,
        *(path + os.sep for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))),
    }
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def where_is(thread: int, is_foreign: Callable[[str], bool]) -> tuple[str, int, str] | None:
    """Return file, line and function of the innermost frame of `thread` in a file that is not foreign."""
    frames: Mapping[int, Any] = current_frames()
    frame = frames.get(thread)
    innermost = None
    while frame is not None:
        code = frame.f_code
        if not is_foreign(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        innermost = innermost or (code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return innermost


def is_foreign(file: str) -> bool:
    """Return whether a file is part of this package, Python or an installed package, rather than user code."""
    # Code that libraries generate as text has no source lines; use the line that runs it.
    return file.startswith((*_FOREIGN, "<frozen", "<string>")) or any(part in file for part in _INSTALLED)


def fault_of(error: BaseException) -> Fault:
    """Return the fault of an exception that ended a cell."""
    interrupt_first(error)
    # For an interrupt, the line of user code matters, not the waiting code below it.
    waits = WAITING if isinstance(error, KeyboardInterrupt) else ()
    fault = capture(error, (_KERNEL, *_ipython(), *waits))
    return msgspec.structs.replace(fault, of_peer=True) if failed_by_peer(error) else fault


def _ipython() -> tuple[str, ...]:
    module = sys.modules.get("IPython")
    file = getattr(module, "__file__", None)
    return (os.path.dirname(file) + os.sep,) if file else ()
