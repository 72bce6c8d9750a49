"""The frames of all threads, and exceptions raised in them, without what Python 3.11 does wrongly with both; and
tracebacks without frames that tell nothing.

Any of our packages may import this module, and it imports none of them.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

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


def without_last_frames(
    traceback: TracebackType | None, hides: Callable[[str], bool], least: int = 0
) -> TracebackType | None:
    """A traceback without its innermost frames, as long as these are in files that are hidden.

    Args:
        hides: whether frames in a file are.
        least: how many of the outermost frames stay in any case.
    """
    frames: list[TracebackType] = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    while len(frames) > least and hides(frames[-1].tb_frame.f_code.co_filename):
        frames.pop()
    made: TracebackType | None = None
    for each in reversed(frames):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made


class _Noticed(BaseException):
    """Raised in the calling thread, so that the interpreter no longer looks for exceptions."""


def raise_in_thread(thread: int, exception: type[BaseException] | None) -> None:
    """Raise an exception in another thread, at its next line of Python; None withdraws one that has not arrived.

    In Python 3.11, all threads look for the exception until it has arrived, and a traced thread that enters a function
    meanwhile looks for ever: a process with breakpoints stands still while the other thread waits in C. Here they look
    no more when this returns. The other thread looks again by itself as soon as it gets the interpreter lock.
    """
    import ctypes  # few processes raise anything

    # The arguments are made first: nothing of this function's may be called between the two calls.
    there, raised = ctypes.c_ulong(thread), ctypes.py_object(exception) if exception is not None else None
    here, noticed = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(_Noticed)
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    if sys.version_info >= (3, 12) or (exception is not None and there.value == here.value):
        set_exception(there, raised)
        return
    try:
        set_exception(there, raised)
        set_exception(here, noticed)
        while True:
            pass
    except _Noticed:
        pass


def _in_child() -> None:
    """In a fork, the thread that was in there does not exist."""
    global _lock, _disabled
    _lock = threading.Lock()
    if _disabled:
        gc.enable()
        _disabled = False


if sys.version_info < (3, 12):
    os.register_at_fork(after_in_child=_in_child)
