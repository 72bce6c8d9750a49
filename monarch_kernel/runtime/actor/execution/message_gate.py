"""The gate before the actors of a process: it lets a tool change their code between two of their messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: How long messages are held at a time while others are still being handled, and the pause before the next attempt
#: (seconds). An endpoint may wait for another actor of this process, whose messages are held.
HOLD = 0.2
PAUSE = 0.2
#: The interval at which the gate checks whether all actors are idle (seconds).
GATE_PERIOD = 0.0005


class StillBusy(TimeoutError):
    """Actors of this process were handling messages all the time. The message names the running endpoints."""


class MessageGate:
    """Holds the messages of a process's actors.

    An actor first records that it handles a message, then reads ``closed``. The gate first closes, then reads which
    actors handle messages. At least one of the two therefore sees the other.
    """

    def __init__(self) -> None:
        self.closed = False
        self._opened = threading.Event()
        self._one = threading.Lock()

    def wait(self) -> None:
        """Wait until messages are not held. Called by an actor that has found the gate closed."""
        self._opened.wait()

    def between(self, function: Callable[[], T], busy: Callable[[], list[str]], wait: float) -> T:
        """Run a function while no message is being handled.

        Args:
            function: must not wait for an actor of this process.
            busy: returns what is running now, for the error; empty if nothing is.
            wait: the time limit for becoming idle (seconds).

        Raises:
            StillBusy: actors were handling messages all the time.
        """
        with self._one:
            deadline = time.monotonic() + wait
            while True:
                try:
                    self._opened.clear()
                    self.closed = True
                    running = self._wait_idle(busy, min(deadline, time.monotonic() + HOLD))
                    if not running:
                        return function()
                finally:
                    self.closed = False
                    self._opened.set()
                if time.monotonic() >= deadline:
                    raise StillBusy(", ".join(running))
                time.sleep(min(PAUSE, max(0.0, deadline - time.monotonic())))

    @staticmethod
    def _wait_idle(busy: Callable[[], list[str]], until: float) -> list[str]:
        while True:
            running = busy()
            if not running or time.monotonic() >= until:
                return running
            time.sleep(GATE_PERIOD)
