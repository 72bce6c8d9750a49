"""Interrupts that come while a cell is being sent to its ranks."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class HeldInterrupts:
    """From `hold` to `release`, SIGINT only is noted; `deliver` then does with it what would have been done."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, FrameType | None]] = []
        self._handler: Any = None
        self._holds = False

    def hold(self) -> None:
        """Note interrupts from now on; without effect outside the main thread, where none arrive."""
        if threading.current_thread() is threading.main_thread():
            self._holds = True
            self._handler = signal.signal(signal.SIGINT, lambda number, frame: self._noted.append((number, frame)))

    def release(self) -> None:
        """Back to the handler that was in place. May be called again."""
        if self._holds:
            self._holds = False
            signal.signal(signal.SIGINT, self._handler)

    def deliver(self) -> None:
        """Hand the oldest noted interrupt to the handler that was in place; it may raise KeyboardInterrupt."""
        if self._noted:
            noted = self._noted.pop(0)
            if callable(self._handler):
                self._handler(*noted)
