"""The frames of all threads, without the deadlock and the dangling frames of Python 3.11.

Any of our packages may import this module, and it imports none of them.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

_lock = threading.Lock()
_disabled = False


def current_frames() -> dict[int, FrameType]:
    """The innermost frame of each thread, by its ``threading.get_ident()``.

    In Python 3.11, ``sys._current_frames()`` holds a lock of the interpreter while it allocates. A garbage collection
    that this sets off may let another thread run, and if that starts a thread it waits for the lock, with the
    interpreter lock: the process stands still for ever (python/cpython#106883). Nothing is collected meanwhile.

    ``f_back`` of a frame that another thread runs allocates, too, the first time: a collection there may let that
    thread return from the frame that is being looked at. So all outer frames are made here as well.
    """
    global _disabled
    if sys.version_info >= (3, 12):  # collections wait until no C code is under way
        return sys._current_frames()
    with _lock:
        if not gc.isenabled():
            return _with_outer_frames()
        _disabled = True
        gc.disable()
        try:
            return _with_outer_frames()
        finally:
            gc.enable()
            _disabled = False


def _with_outer_frames() -> dict[int, FrameType]:
    frames = sys._current_frames()
    for frame in frames.values():
        outer: FrameType | None = frame
        while outer is not None:
            outer = outer.f_back
    return frames


def _in_child() -> None:
    """In a fork, the thread that was in there does not exist."""
    global _lock, _disabled
    _lock = threading.Lock()
    if _disabled:
        gc.enable()
        _disabled = False


if sys.version_info < (3, 12):
    os.register_at_fork(after_in_child=_in_child)
