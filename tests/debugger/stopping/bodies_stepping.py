"""What is tested of steps, for every Python: each function here is one test."""

from __future__ import annotations

import inspect
import sys

from monarch_kernel.debugger.model.stops import Breakpoint
from tests.debugger.stopping import guest
from tests.debugger.stopping.driving import Running, line, session


def next_over_calls_to_the_end() -> None:
    with session() as s:
        s.break_at("caller first")
        thread = Running(guest.caller, 1)
        stop = s.stopped_at("caller first")
        stop = s.walk(stop, "next", "caller call", "caller after", "caller return")
        s.go(stop, "next")  # its caller is the test's: user code
        stop = s.stopped()
        assert stop.text == "caller returned 5" and stop.frames[0].name.endswith("_run"), stop
        s.go(stop)
        assert thread.ended() == 5
        s.nothing_more()


def step_into_and_out() -> None:
    with session() as s:
        s.break_at("two calls")
        thread = Running(guest.two_calls)
        stop = s.stopped_at("two calls")
        stop = s.walk(stop, "step", "plain first")
        stop = s.walk(stop, "out", "two calls")
        assert stop.text == "plain returned 4", stop
        stop = s.walk(stop, "step", "other", "two calls", "two return")
        s.go(stop)
        assert thread.ended() == 5
        s.nothing_more()


def step_through_returns() -> None:
    with session() as s:
        s.break_at("deep step")
        thread = Running(guest.deep_step, 1)
        stop = s.stopped_at("deep step")
        stop = s.walk(stop, "step", "middle step", "inner step", "middle step", "deep step", "deep step after")
        s.go(stop)
        assert thread.ended() == 2


def until_a_line() -> None:
    with session() as s:
        s.break_at("counted body")
        thread = Running(guest.counted, 100)
        stop = s.stopped()
        s.engine.arm([])
        s.go(stop, "until")
        stop = s.stopped()
        assert stop.frames[0].source == "return total", stop
        s.go(stop)
        assert thread.ended() == 4950
        s.break_at("plain first")
        thread = Running(guest.plain, 1)
        s.go(s.stopped(), "until", line("plain return"))
        s.go(s.stopped_at("plain return"))
        thread.ended()


def recursion() -> None:
    with session() as s:
        s.break_at("recurse call", condition="n == 3")
        thread = Running(guest.recurse, 5)
        stop = s.stopped_at("recurse call")
        assert len([frame for frame in stop.frames if frame.name == "recurse"]) == 3
        stop = s.walk(stop, "next", "recurse after")
        assert s.engine.evaluate(stop.id, 0, "n").text == "3"
        stop = s.walk(stop, "out", "recurse call")
        assert s.engine.evaluate(stop.id, 0, "n").text == "4"
        s.go(stop)
        assert thread.ended() == 5
        s.nothing_more()


def steps_and_exceptions() -> None:
    with session() as s:
        s.break_at("handles call")
        thread = Running(guest.handles)
        stop = s.stopped_at("handles call")
        stop = s.walk(stop, "next", "handles except", "handles body")
        s.go(stop)
        assert thread.ended() == "n is 3"
        for how in ("next", "out", "step"):
            s.break_at("lookup")
            thread = Running(guest.handles_deep)
            stop = s.stopped_at("lookup")
            s.go(stop, how)
            stop = s.stopped()
            assert stop.frames[0].name == "handles_deep", stop  # at the `with`, which swallows it, or after it
            s.go(stop)
            assert thread.ended() == ""
        s.break_at("raises")
        thread = Running(lambda: guest.raises(1))
        s.go(s.stopped_at("raises"), "next")
        # The test's own `except` comes next.
        stop = s.stopped()
        assert stop.frames[0].name.endswith("_run"), stop
        s.go(stop)
        try:
            thread.ended()
        except ValueError:
            pass
        s.nothing_more()


def steps_through_libraries() -> None:
    with session() as s:
        s.break_at("callbacks call")
        thread = Running(guest.callbacks)
        stop = s.stopped_at("callbacks call")
        stop = s.walk(stop, "step", "key")
        stop = s.walk(stop, "out", "callbacks call")
        s.engine.arm([])
        stop = s.walk(stop, "next", "callbacks lambda", "callbacks return")
        s.go(stop)
        thread.ended()


def generators() -> None:
    with session() as s:
        s.break_at("numbers yield")
        thread = Running(guest.consume, 2)
        stop = s.stopped_at("numbers yield")
        s.engine.arm([])
        stop = s.walk(stop, "next", "consume body", "consume for")
        stop = s.walk(stop, "step", "numbers for", "numbers yield", "consume body")
        stop = s.walk(stop, "next", "consume for", "consume return")
        s.go(stop)
        assert thread.ended() == [0, 10]


def generator_out_to_its_consumer() -> None:
    with session() as s:
        s.break_at("numbers yield")
        thread = Running(guest.consume, 2)
        stop = s.stopped_at("numbers yield")
        s.engine.arm([])
        stop = s.walk(stop, "out", "consume body")
        s.go(stop)
        thread.ended()
        s.break_at("numbers last")
        thread = Running(guest.consume, 2)
        stop = s.stopped_at("numbers last")
        s.go(stop, "out")
        stop = s.stopped_at("consume for")
        s.go(stop)
        thread.ended()


def generator_that_c_consumes() -> None:
    with session() as s:
        s.break_at("numbers yield")
        thread = Running(lambda: list(guest.numbers(3)))
        stop = s.stopped_at("numbers yield")
        s.engine.arm([])
        stop = s.walk(stop, "next", "numbers for", "numbers yield")
        assert s.engine.evaluate(stop.id, 0, "i").text == "1"
        s.go(stop)
        assert thread.ended() == [0, 10, 20]


def coroutines() -> None:
    with session() as s:
        s.break_at("napper before")
        thread = Running(guest.run_async, guest.with_noise)
        stop = s.stopped_at("napper before")
        # `next` comes back to the same coroutine, whatever ran in between; so does `step`.
        stop = s.walk(stop, "next", "napper await", "napper after")
        stop = s.walk(stop, "next", "napper return", "with noise", "with noise after")
        s.go(stop)
        assert thread.ended() == 6
        thread = Running(guest.run_async, guest.with_noise)
        stop = s.stopped_at("napper before")
        stop = s.walk(stop, "step", "napper await", "napper after", "napper return", "with noise")
        s.go(stop)
        assert thread.ended() == 6
        s.nothing_more()


def coroutine_that_is_cancelled() -> None:
    import asyncio

    async def main() -> str:
        task = asyncio.create_task(guest.napper(1))
        await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return "cancelled"
        return "ran through"

    with session() as s:
        s.break_at("napper await")
        thread = Running(asyncio.run, main())
        s.go(s.stopped_at("napper await"), "next")
        assert thread.ended() == "cancelled"
        s.nothing_more()


def await_into_and_out() -> None:
    with session() as s:
        s.break_at("awaiter await")
        thread = Running(guest.run_async, guest.awaiter)
        stop = s.stopped_at("awaiter await")
        stop = s.walk(stop, "step", "napper before")
        stop = s.walk(stop, "out", "awaiter await")
        stop = s.walk(stop, "next", "awaiter after")
        s.go(stop)
        assert thread.ended() == 3


def one_steps_while_others_run() -> None:
    states = [{"run": True} for _ in range(2)]
    with session() as s:
        spinners = [Running(guest.spin, state) for state in states]
        s.break_at("caller first")
        thread = Running(guest.caller, 1)
        stop = s.stopped_at("caller first")
        stop = s.walk(stop, "step", "caller call", "plain first", "plain second", "plain return", "caller call")
        stop = s.walk(stop, "next", "caller after")
        s.go(stop)
        thread.ended()
        for state in states:
            state["run"] = False
        for spinner in spinners:
            spinner.ended()
        s.nothing_more()


def stop_here_and_steps() -> None:
    with session() as s:

        def hook() -> None:
            s.engine.stop_here(sys._getframe(1), "breakpoint()", "a note")

        thread = Running(guest.hit_breakpoint, hook)
        stop = s.stopped_at("hook", "breakpoint()")
        assert stop.text == "a note"
        assert s.engine.evaluate(stop.id, 0, "before + 1").text == "2"
        stop = s.walk(stop, "next", "after hook", "hook return")
        s.go(stop)
        assert thread.ended() == 2
        thread = Running(guest.hit_breakpoint, hook)
        s.go(s.stopped_at("hook"), "step")
        s.go(s.stopped_at("after hook"))
        assert thread.ended() == 2
        s.nothing_more()


def a_library() -> None:
    """A breakpoint in the standard library: where a user's code calls it, and steps there are steps of the library."""
    import textwrap

    def work() -> str:
        return textwrap.shorten("a b c", 3, placeholder="")

    source, first = inspect.getsourcelines(textwrap.shorten)
    at = next(first + i for i, text in enumerate(source) if "TextWrapper(" in text)
    with session() as s:
        (bound,) = s.engine.arm([Breakpoint(1, textwrap.__file__, at)])
        assert bound.verified
        thread = Running(work)
        stop = s.stopped()
        assert stop.frames[0].name == "shorten" and not stop.frames[0].user
        s.engine.arm([])
        s.go(stop, "step")
        stop = s.stopped()
        assert stop.frames[0].name == "TextWrapper.__init__", stop
        s.go(stop, "out")
        stop = s.stopped()
        assert stop.frames[0].name == "shorten", stop
        s.go(stop, "out")
        stop = s.stopped()
        assert stop.frames[0].name.endswith("work"), stop
        s.go(stop)
        assert thread.ended() == "a b"


def two_tasks_in_one_coroutine() -> None:
    import asyncio

    async def both() -> list[int]:
        return list(await asyncio.gather(guest.napper(1), guest.napper(2)))

    with session() as s:
        s.break_at("napper before")
        thread = Running(guest.run_async, both)
        stop = s.stopped_at("napper before")
        assert s.engine.evaluate(stop.id, 0, "n").text == "1"
        s.engine.arm([])
        stop = s.walk(stop, "next", "napper await", "napper after")
        assert s.engine.evaluate(stop.id, 0, "n").text == "1"
        s.go(stop)
        assert thread.ended() == [2, 3]
        s.nothing_more()


def deep_stacks() -> None:
    with session() as s:
        s.break_at("recurse end")
        thread = Running(guest.recurse, 500)
        stop = s.stopped()
        assert len(stop.frames) == 256 and stop.frames[255].index == 255
        s.go(stop)
        assert thread.ended() == 500
