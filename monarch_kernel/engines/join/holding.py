"""Hold a failed rank for inspection: after an exception, it keeps its frames and its process for a while."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

#: The default time that a rank is held (seconds).
USUAL = 600.0
#: The interval at which a held rank checks whether it may end (seconds). Its main thread handles signals then.
LOOK = 0.2
_LONGEST = 300


class Holding:
    """Handles an uncaught exception of this process.

    Args:
        seconds: how long its main thread waits for a viewer to inspect it; 0: it does not wait.
        how: instructions for inspecting it, for the log of the program.
    """

    def __init__(self, seconds: float, how: str) -> None:
        self.seconds = seconds
        #: Why this process is held, and until when (`time.time()`); "" and 0 if it is not held.
        self.held = ""
        self.until = 0.0
        self._how = how
        self._released = threading.Event()
        self._before: Callable[..., object] | None = None

    def arm(self) -> None:
        """Hold this process if it fails from now on, even without an earlier request."""
        self.seconds = self.seconds or USUAL
        self.install()

    def install(self) -> None:
        """Install the hooks for exceptions that end the program. A second call has no effect."""
        if self._before is None:
            self._before = sys.excepthook
            sys.excepthook = self._on_error

    def remove(self) -> None:
        """Remove the hooks, unless ranks are to be held."""
        if not self.seconds and self._before is not None and sys.excepthook == self._on_error:
            sys.excepthook = self._before
            self._before = None

    def release(self) -> None:
        """End a held process now, because a viewer has inspected it."""
        if self.held:
            self._released.set()

    def _on_error(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, Exception) and threading.current_thread() is threading.main_thread():
            with suppress(Exception):  # no error of a tool hides the program's own error
                self._keep(error)
        (self._before or sys.__excepthook__)(kind, error, traceback)

    def _keep(self, error: BaseException) -> None:
        """Store the frames for post-mortem debugging. A debugger that waits for errors stops here."""
        from monarch_kernel.introspection import keep_failure

        keep_failure(error, "", ("program", "main"), _never)
        if not self.seconds:
            return
        said = f"{type(error).__name__}: {error}"
        self.until = time.time() + self.seconds
        self.held = said if len(said) <= _LONGEST else f"{said[: _LONGEST - 1]}…"
        # Not to `sys.stderr`, which torch.distributed holds back until this function has ended.
        print(f"held for {self.seconds:g} s after {self.held}: {self._how}", file=sys.__stderr__, flush=True)
        while time.time() < self.until and not self._released.wait(LOOK):
            pass
        self.held = ""


def _never(_delay: float, _callback: Callable[[], None]) -> None:
    """Never expire the frames: the process is about to end."""
