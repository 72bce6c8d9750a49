"""Read the frames of all threads and raise exceptions in threads, working around two bugs of Python 3.11.

The module also trims uninformative frames from tracebacks. Any package of this project may import it; it imports none
of them.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType

_lock = threading.Lock()
_disabled = False

_LOCKING = frozenset(
    function.__code__
    for function in (
        threading.Condition.__enter__,
        threading.Condition.__exit__,
        threading.Condition._release_save,  # type: ignore[attr-defined]
        threading.Condition._acquire_restore,  # type: ignore[attr-defined]
    )
)


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its ``threading.get_ident()``.

    In Python 3.11, ``sys._current_frames()`` holds an interpreter lock while it allocates. The allocation may start a
    garbage collection, which may switch to another thread. If that thread starts a thread, it waits for the lock while
    it holds the GIL, and the process deadlocks (python/cpython#106883). This function disables collections meanwhile.

    In a frame that another thread runs, the first access to ``f_back`` allocates, too. A collection at that point may
    let the thread return from the inspected frame. This function therefore also creates all outer frames.
    """
    global _disabled
    if sys.version_info >= (3, 12):  # here, collections do not start while C code runs
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
    """Return a traceback without its innermost frames in hidden files.

    Args:
        hides: returns whether frames of a file are hidden.
        least: the minimum number of outermost frames to keep.
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
    """Raised and caught in the calling thread, so that the interpreter stops checking for asynchronous exceptions."""


def raise_in_thread(thread: int, exception: type[BaseException] | None) -> None:
    """Raise an exception in another thread, at its next line of Python. None withdraws an exception not yet raised.

    If the thread is taking or releasing a lock, this waits a little; see `LockGuard`.

    In Python 3.11, every thread checks for the exception until it is raised, and a traced thread that enters a function
    meanwhile checks forever. A process with breakpoints would hang while the target thread waits in C. When this
    function returns, the other threads no longer check. The target thread checks again when it next acquires the GIL.
    """
    import ctypes  # rarely needed

    guard = LockGuard()
    while exception is not None and guard.must_wait(current_frames().get(thread)):
        time.sleep(LockGuard.DELAY)
    # The arguments are made first: no Python code may run between the two calls.
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


class LockGuard:
    """Postpones exceptions of other threads and signal handlers while a thread takes or releases a lock.

    An exception raised there would leave a lock of the standard library held, and the next user of an event, condition,
    queue or log would wait forever. It is postponed only a few times in succession, because the thread may wait for
    the lock in vain.
    """

    #: The delay before the next attempt (seconds), and how often in succession.
    DELAY, TIMES = 0.005, 20

    def __init__(self) -> None:
        self._times = 0

    def must_wait(self, frame: FrameType | None) -> bool:
        """Return whether nothing must be raised in a thread with this frame now; try again after ``DELAY``."""
        # Outer frames, too: a handler is called from such a frame when a second signal interrupts it.
        while frame is not None and not _is_locking(frame.f_code):
            frame = frame.f_back
        self._times = 0 if frame is None else self._times + 1
        return 0 < self._times <= self.TIMES

    def postpones(self, signum: int, frame: FrameType | None) -> bool:
        """Return whether a handler must not raise now. The signal is then sent again."""
        if not self.must_wait(frame):
            return False
        timer = threading.Timer(self.DELAY, signal.pthread_kill, (threading.main_thread().ident, signum))
        timer.daemon = True
        timer.start()
        return True


def _is_locking(code: CodeType) -> bool:
    logging = sys.modules.get("logging")  # may not have been needed yet
    return code in _LOCKING or (logging is not None and code is logging.Handler.acquire.__code__)


def _in_child() -> None:
    """Reset the lock in a forked child: the thread that held it does not exist there."""
    global _lock, _disabled
    _lock = threading.Lock()
    if _disabled:
        gc.enable()
        _disabled = False


if sys.version_info < (3, 12):
    os.register_at_fork(after_in_child=_in_child)
