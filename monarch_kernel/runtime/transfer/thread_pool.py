"""Threads for large copies, which start on demand and end soon after the last copy."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

#: The time that a thread waits for more work before it ends (seconds).
IDLE = 0.2


class ThreadPool:
    """Runs jobs on at most ``most`` daemon threads."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0

    def run(self, job: Callable[[], None]) -> None:
        """Run ``job`` soon. It must not raise."""
        with self._changed:
            self._jobs.append(job)
            if self._idle >= len(self._jobs) or self._threads == self._most:
                self._changed.notify()
                return
            self._threads += 1
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def runs_here(self) -> bool:
        """Return whether the calling thread belongs to the pool."""
        return threading.current_thread().name == self._name

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._idle += 1
                    self._changed.wait(IDLE)
                    self._idle -= 1
                if not self._jobs:
                    self._threads -= 1
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                log.exception("a transfer job failed; this is a bug in monarch_kernel")
            del job  # it may hold a large array


class SharedCopy:
    """The pieces of one copy, shared by several threads. A late thread finds none left and holds none of the memory."""

    def __init__(self, pieces: list[tuple[int, int]], move: Callable[[int, int], None]) -> None:
        self._pieces = deque(pieces)
        self._move: Callable[[int, int], None] | None = move
        self._running = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def help(self) -> None:
        """Copy pieces until none is left."""
        with self._changed:
            if self._move is None:
                return
            self._running += 1
        try:
            while self._error is None:
                try:
                    lo, hi = self._pieces.popleft()
                except IndexError:
                    break
                self._move(lo, hi)
        except BaseException as e:
            self._error = e
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """Copy pieces, then wait for the other threads. Raises any exception of theirs."""
        self.help()
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
            self._move = None
        if self._error is not None:
            raise self._error
