"""The tracer in ranks: endpoints on the main thread, on threads and on event loops, cells, and interrupts."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_kernel.actor import ActorError, this_host
from monarch_kernel.debugger.model.stops import Breakpoint, Stop
from tests.debugger.stopping import debugged, guest
from tests.debugger.stopping.debugged import AsyncDebugged, Debugged, Driver
from tests.debugger.stopping.driving import line
from tests.waiting import patience

PATIENCE = patience(30.0)
CELL = "/tmp/ipykernel_7/42.py"


class Rank:
    """One rank: its proc mesh, the engine's driver, and an actor to stop."""

    def __init__(self, cls: type) -> None:
        self.world = this_host().spawn_procs(per_host={"gpus": 1})
        self.user = self.world.spawn("user", cls)
        self.driver = self.world.spawn("driver", Driver)

    def arm(self, *places: tuple[str, int]) -> None:
        """Breakpoints at these lines only."""
        specs = [Breakpoint(number, file, at) for number, (file, at) in enumerate(places, 1)]
        self.driver.arm.call_one(specs).get(PATIENCE)

    def stopped(self) -> Stop:
        """The next stop."""
        return self.driver.stopped.call_one().get(PATIENCE)

    def go(self, stop: Stop, how: str = "continue") -> None:
        """Let it go on."""
        self.driver.resume.call_one(stop.id, how).get(PATIENCE)

    def walk(self, stop: Stop, how: str, *lines: int) -> Stop:
        """Step from line to line."""
        for number in lines:
            self.go(stop, how)
            stop = self.stopped()
            assert stop.frames[0].line == number, stop
        return stop

    def nothing_more(self) -> None:
        """It has not stopped again."""
        assert self.driver.further.call_one().get(PATIENCE) == []


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    yield Rank(getattr(request, "param", Debugged))


def own_line(mark: str) -> int:
    """The line of the debugged actors with that mark."""
    texts = linecache.getlines(debugged.FILE)
    return next(number for number, text in enumerate(texts, 1) if text.rstrip().endswith(f"# mark: {mark}"))


@pytest.mark.parametrize("how", ["next", "step", "out"])
def test_a_step_out_of_an_endpoint_ends_the_step(rank: Rank, how: str) -> None:
    rank.arm((debugged.FILE, own_line("endpoint return")))
    pending = rank.user.run.call_one("plain", 1)
    stop = rank.stopped()
    assert (stop.actor, stop.endpoint) == ("user", "run")
    assert stop.frames[0].name == "Debugged.run" and stop.frames[0].user
    assert not any(frame.user for frame in stop.frames[1:]), stop.frames
    rank.go(stop, how)
    assert pending.get(PATIENCE) == 4
    # Nothing of that step is left for the next call.
    rank.arm()
    assert rank.user.run.call_one("plain", 2).get(PATIENCE) == 6
    rank.nothing_more()


def test_steps_between_endpoint_and_callee_and_the_debugger_beside(rank: Rank) -> None:
    rank.arm((guest.__file__, line("plain second")))
    pending = rank.user.run.call_one("caller", 3)
    stop = rank.stopped()
    stop = rank.walk(stop, "out", line("caller call"))
    stop = rank.walk(stop, "next", line("caller after"), line("caller return"), own_line("endpoint return") - 1)
    assert rank.driver.evaluate.call_one(stop.id, "name").get(PATIENCE).text == "'caller'"
    rank.go(stop)
    assert pending.get(PATIENCE) == 9
    rank.nothing_more()


@pytest.mark.parametrize("rank", [AsyncDebugged], indirect=True)
def test_an_endpoint_that_is_a_coroutine(rank: Rank) -> None:
    rank.arm((guest.__file__, line("napper before")))
    pending = rank.user.run.call_one(5)
    stop = rank.stopped()
    steps = line("napper await"), line("napper after"), line("napper return"), own_line("async endpoint return") - 2
    stop = rank.walk(stop, "next", *steps)
    stop = rank.walk(stop, "next", own_line("async endpoint return") - 1, own_line("async endpoint return"))
    rank.go(stop, "next")
    assert pending.get(PATIENCE) == 6
    rank.nothing_more()


def test_a_step_goes_on_to_the_last_expression_of_a_cell(rank: Rank) -> None:
    source = "a = 1\nb = a + 1\n(a, b)\n"
    rank.arm((CELL, 1))
    pending = rank.user.cell.call_one(source, CELL)
    stop = rank.stopped()
    stop = rank.walk(stop, "next", 2, 3)
    assert stop.frames[0].file == CELL and stop.frames[0].source == "(a, b)"
    rank.go(stop, "next")
    assert pending.get(PATIENCE) == [(1, 2)]
    # The cell has ended, and the step with it.
    rank.arm()
    assert rank.user.cell.call_one("3", CELL).get(PATIENCE) == [(1, 2), 3]
    rank.nothing_more()


def test_a_cell_that_awaits(rank: Rank) -> None:
    source = "import asyncio\nawait asyncio.sleep(0)\nx = 2\nx\n"
    rank.arm((CELL, 1))
    pending = rank.user.cell.call_one(source, CELL)
    stop = rank.walk(rank.stopped(), "next", 2, 3, 4)
    rank.go(stop, "step")
    assert pending.get(PATIENCE) == [2]
    rank.nothing_more()


@pytest.mark.parametrize("first", [True, False], ids=["main thread", "own thread"])
def test_an_interrupt_ends_the_stop(rank: Rank, first: bool) -> None:
    user: Any = rank.user if first else rank.world.spawn("second", Debugged)
    rank.arm((guest.__file__, line("interruptible")), (guest.__file__, line("spin")))
    pending = user.run.call_one("interruptible")
    rank.stopped()
    rank.world.interrupt().get(PATIENCE)
    assert pending.get(PATIENCE) == "interrupted"  # the user's `except KeyboardInterrupt` had it
    pending = user.run.call_one("spin", {"run": True})
    stop = rank.stopped()
    assert stop.frames[0].name == "spin"
    rank.world.interrupt().get(PATIENCE)
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        pending.get(PATIENCE)
    assert user.run.call_one("other", 1).get(PATIENCE) == 0


def test_a_pause_stops_what_runs(rank: Rank) -> None:
    rank.arm((guest.__file__, line("spin")))
    pending = rank.user.run.call_one("spin", {"run": True})
    stop = rank.stopped()  # so it runs
    rank.arm()
    rank.driver.resume_and_pause.call_one(stop.id).get(PATIENCE)
    stop = rank.stopped()
    assert stop.reason == "pause" and stop.frames[0].name == "spin"
    rank.driver.evaluate.call_one(stop.id, "state.update(run=False)").get(PATIENCE)
    rank.go(stop)
    assert pending.get(PATIENCE) is None
