"""Actors for the tests: one whose endpoints are stopped, and one that drives the tracer beside it."""

# ruff: noqa: RET504  # lines of their own to stop at

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from typing import Any

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.debugger.model.stops import Bound, Breakpoint, Evaluation, Resumed, Stop, Stopped
from monarch_kernel.debugger.rank.stopping.tracer import StopTracer
from monarch_kernel.introspection import running_here
from monarch_kernel.kernel.cell import Cell
from monarch_kernel.kernel.rank.cell_runner import CellRunner
from tests.debugger.stopping import guest
from tests.waiting import patience

FILE = __file__
DEADLINE = patience(20.0)


class Debugged(Actor):
    """Runs the guest's functions, and cells."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.runner = CellRunner({}, self.shown.append)

    @endpoint
    def run(self, name: str, *args: Any) -> Any:
        """A function of the guest."""
        result = getattr(guest, name)(*args)
        return result  # mark: endpoint return

    @endpoint
    def cell(self, source: str, filename: str) -> list[Any]:
        """A cell; gives what it has shown."""
        outcome = self.runner.run(Cell("1", source, filename, source))
        if outcome.error is not None:
            raise outcome.error
        return self.shown

    @endpoint
    def where(self) -> int:
        """Its thread."""
        return threading.get_ident()


class AsyncDebugged(Actor):
    """Endpoints that are coroutines."""

    @endpoint
    async def run(self, n: int) -> int:
        """Waits on the way."""
        value = await guest.napper(n)
        await asyncio.sleep(0)
        return value  # mark: async endpoint return


class Driver(Actor):
    """Has the engine of its process."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Stopped | Resumed] = queue.SimpleQueue()
        self.engine = StopTracer(self.events.put, lambda *_: True, running_here)

    @endpoint
    def arm(self, breakpoints: Sequence[Breakpoint]) -> list[Bound]:
        """See the engine."""
        return self.engine.arm(breakpoints)

    @endpoint
    def stopped(self) -> Stop:
        """The next stop."""
        while True:
            event = self.events.get(timeout=DEADLINE)
            if isinstance(event, Stopped):
                return event.stop

    @endpoint
    def further(self) -> list[Stop]:
        """Stops that nobody has asked for yet."""
        found: list[Stop] = []
        while not self.events.empty():
            event = self.events.get()
            if isinstance(event, Stopped):
                found.append(event.stop)
        return found

    @endpoint
    def resume(self, stop: int, how: Any = "continue") -> None:
        """See the engine."""
        self.engine.resume(stop, how)

    @endpoint
    def evaluate(self, stop: int, source: str) -> Evaluation:
        """In the innermost frame."""
        return self.engine.evaluate(stop, 0, source)

    @endpoint
    def pause(self) -> None:
        """See the engine."""
        self.engine.pause()

    @endpoint
    def resume_and_pause(self, stop: int) -> None:
        """Pause while the thread of the stop has been told to continue, but has not yet."""
        inside, may_go = threading.Event(), threading.Event()

        def hold(_: object) -> None:
            inside.set()
            may_go.wait(DEADLINE)

        holding = threading.Thread(target=self.engine.call, args=(stop, 0, hold, DEADLINE))
        holding.start()
        assert inside.wait(DEADLINE)
        self.engine.resume(stop)
        self.engine.pause()
        may_go.set()
        holding.join(DEADLINE)
