"""Holds interrupts back while a cell is being sent to its ranks."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class HeldInterrupts:
    """Between `hold` and `release`, SIGINT is only recorded; `deliver` then passes it to its handler."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, FrameType | None]] = []
        self._handler: Any = None
        self._holds = False

    def hold(self) -> None:
        """Record interrupts from now on. No effect outside the main thread, where none arrive."""
        if threading.current_thread() is threading.main_thread():
            self._holds = True
            self._handler = signal.signal(signal.SIGINT, lambda number, frame: self._noted.append((number, frame)))

    def release(self) -> None:
        """Restore the previous handler. May be called again."""
        if self._holds:
            self._holds = False
            signal.signal(signal.SIGINT, self._handler)

    def deliver(self) -> None:
        """Pass the oldest recorded interrupt to the previous handler, which may raise KeyboardInterrupt."""
        if self._noted:
            noted = self._noted.pop(0)
            if callable(self._handler):
                self._handler(*noted)
