"""Hold calls made while their ranks are being healed, like calls after ``spawn``, which wait for the spawn.

A call over a dead rank fails at once. If ``heal()`` is replacing the rank, this process holds the call, and sends it to
the rank's successor when the heal is over. If the heal fails, the call fails as it would have without the heal. Calls
of one process stay in order: a call over a rank that an earlier held call addresses waits, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextvars import copy_context

from monarch_kernel.runtime.actor.context import calling_origin, origin


class HeldCalls:
    """The calls of this process that wait for a heal."""

    def __init__(self) -> None:
        #: Whether callers need to call ``keep`` at all.
        self.active = False
        # Reentrant: a call to this process itself may make further calls.
        self._lock = threading.RLock()
        self._healing: dict[str, int] = {}
        self._kept: list[tuple[frozenset[str], Callable[[], None]]] = []

    def begin(self, procs: Iterable[str]) -> None:
        """Begin to hold calls over these procs, because they or actors on them are being replaced."""
        with self._lock:
            for proc in procs:
                self._healing[proc] = self._healing.get(proc, 0) + 1
            self.active = bool(self._healing or self._kept)

    def keep(self, procs: Iterable[str], send: Callable[[], None]) -> bool:
        """Hold a call to these procs if it must wait, and return whether it does. If so, ``send`` is called later."""
        wanted = frozenset(procs)
        with self._lock:
            if not self._must_wait(wanted, self._kept):
                return False
            context = copy_context()
            context.run(origin.set, calling_origin())
            self._kept.append((wanted, lambda: context.run(send)))
            return True

    def end(self, procs: Iterable[str]) -> None:
        """Send the calls that waited for the heal of these procs, which is over, successful or not."""
        with self._lock:
            for proc in procs:
                self._healing[proc] -= 1
                if not self._healing[proc]:
                    del self._healing[proc]
            kept, self._kept = self._kept, []
            still: list[tuple[frozenset[str], Callable[[], None]]] = []
            for wanted, send in kept:
                if self._must_wait(wanted, still):
                    still.append((wanted, send))
                else:
                    send()
            self._kept = [*still, *self._kept]
            self.active = bool(self._healing or self._kept)

    def _must_wait(self, wanted: frozenset[str], before: list[tuple[frozenset[str], Callable[[], None]]]) -> bool:
        return not wanted.isdisjoint(self._healing) or any(not wanted.isdisjoint(earlier) for earlier, _ in before)
