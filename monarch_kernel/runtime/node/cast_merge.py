"""Restores the order of a process's casts and its other messages, which reach a site on different paths."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Merge:
    """Delivers one source's casts and other messages to one site in the order in which they were sent.

    Attributes:
        cast: the number of the last delivered cast.
        directs: the number of other messages delivered.
    """

    __slots__ = ("_casts", "_directs", "_running", "cast", "directs")

    def __init__(self) -> None:
        self.cast = 0
        self.directs = 0
        self._casts: deque[tuple[int, int, Callable[[], bool], Callable[[], None]]] = deque()
        self._directs: deque[tuple[int, Callable[[], None] | None]] = deque()
        self._running = False

    def add_direct(self, cast: int, deliver: Callable[[], None] | None) -> None:
        """Add a message that was sent after the cast of this number; None: it is only counted, and does not wait."""
        self._directs.append((cast, deliver))
        self.run()

    def add_cast(self, number: int, directs: int, ready: Callable[[], bool], deliver: Callable[[], None]) -> None:
        """Add a cast that was sent after ``directs`` messages; it also waits until it is ``ready``."""
        self._casts.append((number, directs, ready, deliver))
        self.run()

    def run(self) -> None:
        """Deliver everything that can be delivered now."""
        if self._running:
            return
        self._running = True
        try:
            while self._next_direct() or self._next_cast():
                pass
        finally:
            self._running = False

    def _next_direct(self) -> bool:
        if not self._directs:
            return False
        cast, deliver = self._directs[0]
        if deliver is not None and cast > self.cast:
            return False
        self._directs.popleft()
        self.directs += 1
        if deliver is not None:
            deliver()
        return True

    def _next_cast(self) -> bool:
        if not self._casts:
            return False
        number, directs, ready, deliver = self._casts[0]
        if directs > self.directs or not ready():
            return False
        self._casts.popleft()
        self.cast = number
        deliver()
        return True
