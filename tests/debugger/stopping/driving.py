"""What the test bodies use: an engine whose events are waited for with deadlines, and threads of a user's code.

Needs no packages: Pythons that have none run it too.
"""

from __future__ import annotations

import functools
import linecache
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from monarch_kernel.debugger.model.stops import Breakpoint, Resumed, Stop, Stopped
from monarch_kernel.debugger.rank.stopping.tracer import StopTracer
from tests.debugger.stopping import guest
from tests.waiting import patience

FILE = guest.__file__
DEADLINE = patience(20.0)


@functools.lru_cache
def line(mark: str) -> int:
    """The line of the guest's code with that mark."""
    for number, text in enumerate(linecache.getlines(FILE), 1):
        if text.rstrip().endswith(f"# mark: {mark}") or f"# mark: {mark}  #" in text:
            return number
    raise LookupError(mark)


def settle() -> None:
    """Wait until the calling thread is traced: on Python 3.11 again, a moment after an interrupt."""
    end = time.monotonic() + DEADLINE
    while sys.version_info < (3, 12) and sys.gettrace() is None:
        assert time.monotonic() < end, "the thread is not traced any more"


class Running:
    """A user's thread."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self.thread.start()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self.result = function(*args)
        except BaseException as error:
            self.error = error

    def ended(self) -> Any:
        """Its result, once it has ended."""
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive(), "the thread has not ended"
        if self.error is not None:
            raise self.error
        return self.result


class Session:
    """An engine, and what it has said."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Stopped | Resumed] = queue.SimpleQueue()
        self.asked: list[tuple[int, int, Any]] = []
        self.answer: Callable[[Breakpoint, int, Any], bool] = lambda *_: True
        self.engine = StopTracer(self.events.put, self._ask, lambda: ("actor", "endpoint", "cell"))
        # The thread that drives the engine is, as the debug agent's are, never stopped.
        self.engine._busy.add(threading.get_ident())

    def _ask(self, at: Breakpoint, hit: int, value: Any) -> bool:
        self.asked.append((at.id, hit, value))
        return self.answer(at, hit, value)

    def break_at(self, *marks: str, **more: Any) -> list[Any]:
        """Arm breakpoints at marks, numbered from 1 on, with these conditions."""
        return self.engine.arm([Breakpoint(i, FILE, line(mark), **more) for i, mark in enumerate(marks, 1)])

    def stopped(self) -> Stop:
        """The next stop."""
        while True:
            event = self.events.get(timeout=DEADLINE)
            if isinstance(event, Stopped):
                return event.stop

    def stopped_at(self, mark: str, reason: str | None = None) -> Stop:
        """The next stop, which is at a mark."""
        stop = self.stopped()
        at = stop.frames[0]
        assert at.line == line(mark), f"stopped at line {at.line}: {at.source!r}, and not at {mark!r} ({stop})"
        assert reason is None or stop.reason == reason, stop
        return stop

    def go(self, stop: Stop, how: Any = "continue", to: int = 0) -> None:
        """Let a stop go on."""
        self.engine.resume(stop.id, how, to)

    def walk(self, stop: Stop, how: Any, *marks: str) -> Stop:
        """Step from mark to mark."""
        for mark in marks:
            self.go(stop, how)
            stop = self.stopped_at(mark, "step")
        return stop

    def interrupted(self, stop: Stop) -> None:
        """An exception that was raised into its thread has ended that stop."""
        while not isinstance(event := self.events.get(timeout=DEADLINE), Resumed):
            pass
        assert (event.stop, event.how) == (stop.id, "interrupt"), event

    def nothing_more(self) -> None:
        """No further stop has been told of."""
        while not self.events.empty():
            event = self.events.get()
            assert not isinstance(event, Stopped), event


@contextmanager
def session() -> Iterator[Session]:
    """An engine for one test."""
    made = Session()
    try:
        yield made
    finally:
        made.engine.close()
