"""Failures that wait for somebody to look: a rank whose program raises keeps its frames and its process for a while."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

#: How long a rank is held if nobody says (seconds).
USUAL = 600.0
#: How often a held rank looks whether it may end: its main thread takes signals then (seconds).
LOOK = 0.2
_LONGEST = 300


class Holding:
    """What this process does with an exception that nothing has caught.

    Args:
        seconds: how long its main thread waits for a viewer that has looked; 0: it does not wait.
        how: what to do to look, for the log of the program.
    """

    def __init__(self, seconds: float, how: str) -> None:
        self.seconds = seconds
        #: Why this process is held, and until when (`time.time()`); "" and 0: it is not.
        self.held = ""
        self.until = 0.0
        self._how = how
        self._released = threading.Event()
        self._before: Callable[..., Any] | None = None

    def arm(self) -> None:
        """Hold this process from now on if it fails, even if nobody has said so before."""
        self.seconds = self.seconds or USUAL
        self.install()

    def install(self) -> None:
        """Watch exceptions that end the program; a second call does nothing."""
        if self._before is None:
            self._before = sys.excepthook
            sys.excepthook = self._on_error

    def remove(self) -> None:
        """Watch them no longer, unless ranks are to be held."""
        if not self.seconds and self._before is not None and sys.excepthook == self._on_error:
            sys.excepthook = self._before
            self._before = None

    def release(self) -> None:
        """Somebody has looked: a held process ends now."""
        if self.held:
            self._released.set()

    def _on_error(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, Exception) and threading.current_thread() is threading.main_thread():
            with suppress(Exception):  # nothing of a tool hides the program's own error
                self._keep(error)
        (self._before or sys.__excepthook__)(kind, error, traceback)

    def _keep(self, error: BaseException) -> None:
        """Keep its frames for post-mortem debugging; a debugger that waits for errors stops here."""
        from monarch_kernel.introspection import keep_failure

        keep_failure(error, "", ("program", "main"), _never)
        if not self.seconds:
            return
        said = f"{type(error).__name__}: {error}"
        self.until = time.time() + self.seconds
        self.held = said if len(said) <= _LONGEST else f"{said[: _LONGEST - 1]}…"
        # Not to `sys.stderr`, which torch.distributed keeps back until this has ended.
        print(f"held for {self.seconds:g} s after {self.held}: {self._how}", file=sys.__stderr__, flush=True)
        while time.time() < self.until and not self._released.wait(LOOK):
            pass
        self.held = ""


def _never(_delay: float, _callback: Callable[[], None]) -> None:
    """The frames are kept as long as the process: it is about to end."""
