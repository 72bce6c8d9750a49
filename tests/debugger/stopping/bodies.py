"""What is tested of the tracer, for every Python: each function here is one test."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from typing import Any

from monarch_kernel.debugger.model import stops as spec
from monarch_kernel.debugger.model.stops import Breakpoint
from tests.debugger.stopping import guest
from tests.debugger.stopping.driving import DEADLINE, FILE, Running, line, session, settle


def breakpoint_in_a_function() -> None:
    with session() as s:
        (bound,) = s.break_at("plain second")
        assert bound.verified and bound.line == line("plain second"), bound
        thread = Running(guest.caller, 4)
        stop = s.stopped_at("plain second", "breakpoint")
        assert stop.breakpoint == 1 and stop.steppable
        assert (stop.actor, stop.endpoint, stop.cell) == ("actor", "endpoint", "cell")
        assert [frame.name for frame in stop.frames[:2]] == ["plain", "caller"]
        assert stop.frames[0].source.startswith("z = y * 2") and stop.frames[0].user
        assert s.engine.stops() == [stop]
        s.go(stop)
        assert thread.ended() == 11
        assert s.engine.stops() == []
        assert Running(guest.other, 1).ended() == 0
        s.nothing_more()


def running_loop() -> None:
    go_on, begun = threading.Event(), threading.Event()
    with session() as s:
        thread = Running(guest.busy, go_on, begun)
        assert begun.wait(DEADLINE)
        s.break_at("busy turn")
        stop = s.stopped_at("busy turn")
        s.engine.arm([])
        go_on.set()
        s.go(stop)
        assert thread.ended() > 0
        s.nothing_more()


def running_outer_frame() -> None:
    """A frame that waits for one it has called when the breakpoint is set."""
    go_on, begun = threading.Event(), threading.Event()

    def outer() -> int:
        guest.busy(go_on, begun)
        return guest.TOTAL  # mark: outer

    with session() as s:
        thread = Running(outer)
        assert begun.wait(DEADLINE)
        here = outer.__code__.co_firstlineno + 2
        s.engine.arm([Breakpoint(1, __file__, here)])
        go_on.set()
        stop = s.stopped()
        assert stop.frames[0].line == here, stop
        s.go(stop)
        assert thread.ended() == 7


def suspended_generator() -> None:
    with session() as s:
        values = guest.numbers(3)
        assert next(values) == 0
        s.break_at("numbers yield")
        thread = Running(guest.suspended, values)
        stop = s.stopped_at("numbers yield")
        assert s.engine.evaluate(stop.id, 0, "i").text == "1"
        s.go(stop)
        assert thread.ended() == 10


def suspended_coroutine() -> None:
    with session() as s:
        coroutine = guest.waits(Once())
        coroutine.send(None)
        s.break_at("waits after")

        def finish() -> Any:
            try:
                coroutine.send(None)
            except StopIteration as error:
                return error.value

        thread = Running(finish)
        s.go(s.stopped_at("waits after"))
        assert thread.ended() == "done"


class Once:
    """Gives control away once."""

    def __await__(self) -> Any:
        yield


def new_code() -> None:
    """A cell that is compiled after the breakpoint was set, under a name that is no file."""
    name = "/tmp/ipykernel_1/123.py"
    source = "x = 1\n\ndef f(a):\n    b = a\n    return b\n\ny = f(x)\n"
    with session() as s:
        inside, top = s.engine.arm([Breakpoint(1, name, 4), Breakpoint(2, name, 7)])
        assert not inside.verified and "no code at line 4" in inside.message, inside
        assert not top.verified
        space: dict[str, Any] = {}
        thread = Running(lambda: exec(compile(source, name, "exec"), space))
        stop = s.stopped()
        assert (stop.breakpoint, stop.frames[0].line, stop.frames[0].name) == (2, 7, "<module>")
        s.go(stop)
        stop = s.stopped()
        assert (stop.breakpoint, stop.frames[0].line, stop.frames[0].name) == (1, 4, "f")
        s.go(stop)
        thread.ended()
        assert space["y"] == 1


def comprehension_lambda_decorator_class() -> None:
    with session() as s:
        s.break_at("comprehension", hits=3)
        thread = Running(guest.squares, 5)
        stop = s.stopped_at("comprehension")
        s.engine.arm([])
        s.go(stop)
        assert thread.ended() == [0, 1, 4, 9, 16]

        s.break_at("wrapper", "decorated")
        thread = Running(guest.decorated, 2)
        s.go(s.stopped_at("wrapper"))
        s.go(s.stopped_at("decorated"))
        assert thread.ended() == 6

        s.break_at("callbacks lambda")
        thread = Running(guest.callbacks)
        stop = s.stopped_at("callbacks lambda")
        assert stop.frames[0].name == "callbacks"
        s.go(stop)
        stop = s.stopped_at("callbacks lambda")
        assert stop.frames[0].name.endswith("<lambda>"), stop.frames[0]
        s.engine.arm([])
        s.go(stop)
        assert thread.ended() == [3, 2, 1]

        s.break_at("method")
        thread = Running(guest.Thing("t").method)
        stop = s.stopped_at("method")
        assert stop.frames[0].name == "Thing.method"
        s.go(stop)
        assert thread.ended() == "t"


def lines_without_code() -> None:
    with session() as s:
        heads = [line("plain first") - 1, line("decorated head"), line("gap"), line("one line")]
        bounds = s.engine.arm([Breakpoint(i, FILE, at) for i, at in enumerate(heads, 1)])
        assert [bound.line for bound in bounds] == [
            line("plain first"),
            line("decorated"),
            line("gap after"),
            line("one line"),
        ], bounds
        assert all(bound.verified for bound in bounds)
        (beyond,) = s.engine.arm([Breakpoint(1, FILE, 100_000)])
        assert not beyond.verified
        s.break_at("one line")
        thread = Running(guest.one_line, 1)
        s.go(s.stopped_at("one line"))
        assert thread.ended() == 2
        s.nothing_more()


def files_elsewhere() -> None:
    with session() as s:
        at = line("plain first")
        somewhere = "/nowhere/else/tests/debugger/stopping/guest.py"
        found = s.engine.arm(
            [Breakpoint(1, somewhere, at), Breakpoint(2, "guest.py", at), Breakpoint(3, "uest.py", at)]
        )
        assert [bound.verified for bound in found] == [True, True, False]
        (library,) = s.engine.arm([Breakpoint(1, "/srv/me/project/queue.py", 100)])
        assert not library.verified
        (ours,) = s.engine.arm([Breakpoint(1, spec.__file__, 30)])
        assert not ours.verified and "cannot be stopped" in ours.message


def conditions() -> None:
    with session() as s:
        s.break_at("counted body", condition="i == 3 and any(n == i for n in [total])")
        thread = Running(guest.counted, 10)
        stop = s.stopped_at("counted body")
        assert s.engine.evaluate(stop.id, 0, "i").text == "3"
        s.go(stop)
        assert thread.ended() == 45
        s.break_at("counted body", condition="i == 4", hits=1)
        thread = Running(guest.counted, 5)
        s.go(s.stopped())
        assert thread.ended() == 10
        s.nothing_more()

        s.break_at("counted body", condition="nowhere > 1")
        thread = Running(guest.counted, 1)
        stop = s.stopped()
        assert "its condition 'nowhere > 1' failed: NameError: name 'nowhere' is not defined" in stop.text
        s.go(stop)
        thread.ended()


def hits_count() -> None:
    with session() as s:
        s.break_at("counted body", hits=4)
        thread = Running(guest.counted, 5)
        stop = s.stopped()
        assert s.engine.evaluate(stop.id, 0, "i").text == "3"
        s.break_at("counted body", "plain first", hits=4)  # another one beside: the count goes on
        s.go(stop)
        stop = s.stopped()
        assert s.engine.evaluate(stop.id, 0, "i").text == "4"
        s.go(stop)
        thread.ended()


def log_points() -> None:
    import contextlib
    import io

    text = io.StringIO()
    with session() as s, contextlib.redirect_stdout(text):
        s.break_at("counted body", log="i={i} {i:03d} {{}} {missing} {[i]!r}")
        assert Running(guest.counted, 2).ended() == 1
        s.nothing_more()
    name = "<NameError: name 'missing' is not defined>"
    assert text.getvalue() == f"i=0 000 {{}} {name} [0]\ni=1 001 {{}} {name} [1]\n", text.getvalue()


def asking() -> None:
    with session() as s:
        s.answer = lambda _, hit, __: hit == 3
        s.break_at("counted body", differs="total * 2")
        thread = Running(guest.counted, 4)
        stop = s.stopped()
        assert s.asked == [(1, 1, 0), (1, 2, 0), (1, 3, 2)], s.asked
        s.go(stop)
        thread.ended()
        s.break_at("plain first", first=True)
        s.answer = lambda *_: False
        assert Running(guest.plain, 1).ended() == 4
        s.break_at("plain first", differs="nowhere")
        thread = Running(guest.plain, 1)
        stop = s.stopped()
        assert "its expression 'nowhere' failed" in stop.text
        s.go(stop)
        thread.ended()


def many_threads() -> None:
    count = 8
    with session() as s:
        s.break_at("plain second")
        threads = [Running(guest.caller, i) for i in range(count)]
        stops = [s.stopped_at("plain second") for _ in range(count)]
        assert len({stop.thread for stop in stops}) == count
        assert len(s.engine.stops()) == count
        values = sorted(s.engine.evaluate(stop.id, 0, "x").text for stop in stops)
        assert values == [str(i) for i in range(count)]
        for stop in stops:
            s.go(stop, "next")
        stops = [s.stopped_at("plain return", "step") for _ in range(count)]
        free = Running(guest.other, 3)
        assert free.ended() == 2
        for stop in stops:
            s.go(stop)
        assert sorted(thread.ended() for thread in threads) == [2 * i + 3 for i in range(count)]


def errors() -> None:
    with session() as s:

        def fails(n: int) -> None:
            try:
                guest.raises(n)
            except Exception as error:
                s.engine.failed_here(error)

        Running(fails, 1).ended()
        s.nothing_more()
        bound, *_ = s.engine.arm([Breakpoint(5, error="ArithmeticError")])
        assert bound.verified
        Running(fails, 1).ended()
        for name in ("ValueError", "*", "Exception", "builtins.ValueError"):
            s.engine.arm([Breakpoint(5, error=name)])
            thread = Running(fails, 3)
            stop = s.stopped_at("raises", "exception")
            assert stop.text == "ValueError: n is 3" and stop.breakpoint == 5 and not stop.steppable
            assert s.engine.evaluate(stop.id, 0, "n * 2").text == "6"
            try:
                s.go(stop, "next")
            except RuntimeError as error:
                assert "its frames have ended" in str(error)
            else:
                raise AssertionError("an error was stepped")
            s.go(stop)
            thread.ended()


def post_mortem() -> None:
    with session() as s:
        try:
            guest.raises(9)
        except ValueError as raised:
            error = raised
        stop = s.engine.post_mortem(error, ("a", "b", "c"))
        assert s.stopped() == stop and stop.reason == "post mortem" and stop.thread == 0
        assert s.engine.evaluate(stop.id, 0, "n").text == "9"
        assert s.engine.scopes(stop.id, 0)[0].name == "Locals"
        s.go(stop)
        assert s.engine.stops() == []
        try:
            s.engine.evaluate(stop.id, 0, "n")
        except KeyError as gone:
            assert "no stop" in str(gone)
        else:
            raise AssertionError("a post mortem outlived its end")


def pausing() -> None:
    states: list[dict[str, Any]] = [{"run": True} for _ in range(2)]
    with session() as s:
        threads = [Running(guest.spin, state) for state in states]
        while not all(state.get("turns") for state in states):
            pass
        s.engine.pause()
        stops = [s.stopped(), s.stopped()]
        assert {stop.reason for stop in stops} == {"pause"}
        assert {stop.thread for stop in stops} == {thread.thread.ident for thread in threads}
        s.go(stops[0])
        s.engine.pause(stops[0].thread)
        again = s.stopped()
        assert again.thread == stops[0].thread
        for state in states:
            state["run"] = False
        s.go(again)
        s.go(stops[1])
        for thread in threads:
            thread.ended()
        s.engine.pause()
        thread = Running(guest.plain, 1)
        stop = s.stopped()
        assert stop.reason == "pause"
        s.go(stop)
        thread.ended()


def interrupts() -> None:
    """An exception that is raised into a stopped thread arrives in the user's frame; breakpoints hold afterwards."""
    with session() as s:
        s.break_at("interruptible")
        for _ in range(3):
            thread = Running(_twice_interruptible)
            for _ in range(2):
                stop = s.stopped_at("interruptible", "breakpoint")
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(stop.thread), ctypes.py_object(KeyboardInterrupt)
                )
                s.interrupted(stop)
            assert thread.ended() == ["interrupted", "interrupted"]
        assert s.engine.stops() == []


def _twice_interruptible() -> list[str]:
    first = guest.interruptible()
    settle()
    return [first, guest.interruptible()]


def removed_without_a_trace() -> None:
    before = guest.counted(10)
    with session() as s:
        s.break_at("counted body")
        stop_thread = Running(guest.counted, 3)
        stop = s.stopped()
        s.engine.close()
        assert stop_thread.ended() == 3
        assert stop not in s.engine.stops()
        assert guest.counted(10) == before
        assert sys.gettrace() is None and threading.gettrace() is None
        if sys.version_info >= (3, 12):
            monitoring = sys.monitoring
            assert all(monitoring.get_tool(tool) is None for tool in range(6))
        s.break_at("counted body")  # and it can be armed anew
        thread = Running(guest.counted, 1)
        s.go(s.stopped_at("counted body"))
        thread.ended()


def forks_run_on() -> None:
    with session() as s:
        s.break_at("plain first")
        assert Running(guest.forks).ended() == 7
        thread = Running(guest.plain, 1)
        s.go(s.stopped_at("plain first"))
        thread.ended()
        s.nothing_more()


def armed_again_and_again() -> None:
    """Whenever a breakpoint is set in a loop that runs, the loop stops there."""
    state: dict[str, Any] = {"run": True}
    with session() as s:
        thread = Running(guest.spin, state)
        for turn in range(100):
            s.break_at("spin")
            stop = s.stopped_at("spin", "breakpoint")
            s.engine.arm([Breakpoint(9, FILE, line("plain first"))] if turn % 2 else [])
            s.go(stop)
        state["run"] = False
        thread.ended()
        s.nothing_more()


def a_thread_that_ends_in_the_middle() -> None:
    with session() as s:
        s.break_at("plain return")
        thread = Running(guest.plain, 1)
        stop = s.stopped()
        s.engine.pause(stop.thread)  # it will, if it lives so long
        s.engine.pause(12345)  # there is no such thread
        s.engine.arm([])
        s.go(stop, "out")
        s.go(s.stopped(), "next")
        assert thread.ended() == 4
        state: dict[str, Any] = {"run": True}
        other = Running(guest.spin, state)
        while not state.get("turns", 0) > 10:
            pass
        while s.engine.alert:
            pass  # a line of any thread shows that nobody is there to pause
        state["run"] = False
        other.ended()


def beside_another_tracer() -> None:
    """A trace function that is there before gets its events, and the thread back."""
    calls: list[str] = []

    def theirs(frame: Any, event: str, _arg: Any) -> Any:
        if frame.f_code.co_name == "plain":
            calls.append(event)
        return theirs

    with session() as s:
        begun, go_on = threading.Event(), threading.Event()

        def waits() -> Any:
            sys.settrace(theirs)
            try:
                guest.busy(go_on, begun)
                first = guest.plain(1), len(calls)
                s.engine.close()
                return first, guest.plain(1), sys.gettrace()
            finally:
                sys.settrace(None)

        thread = Running(waits)
        assert begun.wait(DEADLINE)
        s.break_at("plain second")
        go_on.set()
        s.go(s.stopped_at("plain second"))
        assert thread.ended() == ((4, 5), 4, theirs), thread.result
        assert calls == ["call", "line", "line", "line", "return"] * 2, calls


def arming_while_threads_end() -> None:
    """The states of threads that end at any moment are not touched: on Python 3.11 that was the process's end."""
    interval = sys.getswitchinterval()
    over = threading.Event()

    def begins_threads() -> None:
        while not over.is_set():
            short = [threading.Thread(target=guest.plain, args=(1,)) for _ in range(5)]
            for thread in short:
                thread.start()
            for thread in short:
                thread.join()

    with session() as s:
        others = [Running(begins_threads) for _ in range(3)]
        sys.setswitchinterval(1e-6)  # the interpreter lock goes over at every chance
        try:
            for _ in range(300):
                s.break_at("counted body", condition="i < 0")
                s.engine.arm([])
        finally:
            sys.setswitchinterval(interval)
            over.set()
        for other in others:
            other.ended()


def interrupts_at_any_moment() -> None:
    """Ctrl-C anywhere in a loop with breakpoints: they still hold, also where a trace function was interrupted."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()
    ignored = 0

    def interrupt(begun: threading.Event, taken: threading.Event) -> None:
        nonlocal ignored
        begun.wait(DEADLINE)
        signal.pthread_kill(main, signal.SIGINT)
        while not taken.wait(5.0):  # a callback of weakref took it: Python prints it there, and goes on
            ignored += 1
            signal.pthread_kill(main, signal.SIGINT)

    try:
        with session() as s:
            s.engine._busy.clear()
            for _ in range(20):
                s.break_at("counted body", condition="i < 0")
                begun, taken = threading.Event(), threading.Event()
                threading.Thread(target=interrupt, args=(begun, taken)).start()
                try:
                    begun.set()
                    while True:
                        guest.counted(100)
                except KeyboardInterrupt:
                    taken.set()
                settle()
            assert ignored < 2
            seen: list[int] = []

            def resume() -> None:
                stop = s.stopped()
                seen.append(stop.frames[0].line)
                s.go(stop)

            s.break_at("plain first")
            other = threading.Thread(target=resume)
            other.start()
            assert guest.plain(1) == 4
            other.join(DEADLINE)
            assert seen == [line("plain first")]
    finally:
        signal.signal(signal.SIGINT, previous)
