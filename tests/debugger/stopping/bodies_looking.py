"""What is tested of looking at a stop, for every Python: each function here is one test."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from monarch_kernel.debugger.model.stops import Resumed
from monarch_kernel.debugger.rank.stopping.expressions import LONG, SHORT, children, counts, long, short
from tests.debugger.stopping import guest
from tests.debugger.stopping.driving import DEADLINE, Running, session, settle

LOCAL = threading.local()


def _raised(error: type[BaseException], function: Any, *args: Any) -> str:
    """What `function` says when it raises that."""
    try:
        function(*args)
    except error as caught:
        return str(caught)
    raise AssertionError(f"no {error.__name__} was raised")


def expressions_and_statements() -> None:
    with session() as s:
        s.break_at("with locals")
        thread = Running(guest.with_locals, 4)
        stop = s.stopped()

        def ask(source: str, frame: int = 0) -> Any:
            return s.engine.evaluate(stop.id, frame, source)

        assert ask("a + 1").text == "5"
        assert ask("sum(a for _ in items)").text == "12"
        assert ask("(lambda: text)()").text == "'hello'"
        assert ask("a = 10").text == ""
        assert ask("a").text == "10"
        assert ask("fresh = a * 2; fresh").text == "20"
        assert ask("[fresh + i for i in items]").text == "[21, 22, 23]"
        assert ask("for i in range(3):\n    items.append(i)\n").error == ""
        assert ask("global TOTAL\nTOTAL = 8").error == ""
        assert ask("nowhere").error == "NameError: name 'nowhere' is not defined"
        assert ask("1 +").error.startswith("SyntaxError")
        assert ask("raise SystemExit(3)").error == "SystemExit: 3"
        assert ask("text = 'half'; 1 / 0").error == "ZeroDivisionError: division by zero"
        assert ask("def twice(x):\n    return x * 2\n").error == ""
        assert ask("twice(a)").text == "20"
        assert "has no frame 99" in _raised(IndexError, ask, "a", 99)
        s.go(stop)
        value = thread.ended()
        assert (value["a"], value["text"], value["items"]) == (10, "half", [1, 2, 3, 0, 1, 2])
        assert guest.TOTAL == 8
        guest.TOTAL = 7


def assignments_in_outer_frames_and_closures() -> None:
    with session() as s:
        s.break_at("plain first")
        thread = Running(guest.caller, 1)
        stop = s.stopped()
        assert s.engine.evaluate(stop.id, 1, "a = 100").error == ""
        s.go(stop)
        assert thread.ended() == 104
        s.break_at("closure call", "closure after")
        thread = Running(guest.closure)
        stop = s.stopped_at("closure call")
        s.engine.evaluate(stop.id, 0, "shared = 5")
        s.engine.evaluate(stop.id, 0, "change()")
        assert s.engine.evaluate(stop.id, 0, "shared").text == "15"
        s.go(stop)
        stop = s.stopped_at("closure after")
        assert s.engine.evaluate(stop.id, 0, "shared").text == "25"
        s.go(stop)
        assert thread.ended() == 25


def in_the_stopped_thread() -> None:
    def work() -> int:
        LOCAL.name = "mine"
        return guest.plain(1)

    with session() as s:
        s.break_at("plain first")
        thread = Running(work)
        stop = s.stopped()
        where = s.engine.evaluate(stop.id, 1, "threading.get_ident(), LOCAL.name")
        assert where.text == f"({stop.thread}, 'mine')"
        assert s.engine.call(stop.id, 0, lambda frame: (threading.get_ident(), frame.f_locals["x"])) == (stop.thread, 1)
        assert _raised(ZeroDivisionError, s.engine.call, stop.id, 0, lambda _: 1 / 0) == "division by zero"
        # What is evaluated does not stop, though it comes by the same breakpoint.
        assert s.engine.evaluate(stop.id, 1, "guest.plain(5)").text == "12"
        s.go(stop)
        assert thread.ended() == 4
        s.nothing_more()


def variables_and_pages() -> None:
    with session() as s:
        s.break_at("with locals")
        thread = Running(guest.with_locals, 4)
        stop = s.stopped()
        s.engine.evaluate(stop.id, 0, "big = list(range(5000)); items = [1, 2, 3]")
        names, everything = s.engine.scopes(stop.id, 0)
        assert (names.name, everything.name) == ("Locals", "Globals")
        found = {v.name: v for v in s.engine.variables(stop.id, names.ref)}
        assert found["a"].value == "4" and found["a"].type == "int" and found["a"].ref == 0
        assert found["items"].indexed == 3 and found["items"].named == 0
        assert [v.name for v in s.engine.variables(stop.id, found["items"].ref)] == ["[0]", "[1]", "[2]"]
        assert found["big"].indexed == 5000 and len(found["big"].value) <= SHORT
        page = s.engine.variables(stop.id, found["big"].ref, 4990, 100)
        assert [v.value for v in page] == [str(i) for i in range(4990, 5000)]
        assert {v.name for v in s.engine.variables(stop.id, found["table"].ref)} == {"'one'", "2"}
        assert "plain" in {v.name for v in s.engine.variables(stop.id, everything.ref)}
        assert s.engine.set_variable(stop.id, names.ref, "a", "a + 1").value == "5"
        assert s.engine.set_variable(stop.id, found["items"].ref, "[1]", "a * 10").value == "50"
        assert s.engine.set_variable(stop.id, found["table"].ref, "'one'", "11").value == "11"
        assert s.engine.evaluate(stop.id, 0, "a, items[1], table['one'], big[0]").text == "(5, 50, 11, 0)"
        thing = s.engine.evaluate(stop.id, 0, "Thing('t')")
        assert thing.type == "tests.debugger.stopping.guest.Thing" and thing.named == 1
        assert [(v.name, v.value) for v in s.engine.variables(stop.id, thing.ref)] == [("name", "'t'")]
        s.engine.set_variable(stop.id, thing.ref, "name", "'u'")
        assert [v.value for v in s.engine.variables(stop.id, thing.ref)] == ["'u'"]
        assert "no child" in _raised(KeyError, s.engine.set_variable, stop.id, found["table"].ref, "'two'", "1")
        assert "has the number" in _raised(KeyError, s.engine.variables, stop.id, 12345)
        s.go(stop)
        assert thread.ended()["items"] == [1, 50, 3]


def slow_evaluations_end() -> None:
    with session() as s:
        s.break_at("plain first")
        thread = Running(guest.plain, 1)
        stop = s.stopped()
        slow = guest.Slow()
        s.engine.call(stop.id, 0, lambda frame: frame.f_globals.update(slow=slow))
        answer = s.engine.evaluate(stop.id, 0, "slow", timeout=0.2)
        assert "no answer" in answer.error and "0.2 s" in answer.error, answer
        assert s.engine.evaluate(stop.id, 0, "x").text == "1"
        assert "no answer" in _raised(TimeoutError, s.engine.call, stop.id, 0, lambda _: repr(slow), 0.1)
        slow.gate.set()
        assert s.engine.evaluate(stop.id, 0, "slow").text == "Slow()"
        s.go(stop)
        assert thread.ended() == 4


def evaluations_that_wait_in_c() -> None:
    """In the main thread they end; elsewhere they go on, and no other thread stands still for them."""
    with session() as s:
        reader, writer = os.pipe()
        s.engine._busy.clear()
        s.engine._busy.add(0)
        s.break_at("plain first")
        answers: list[Any] = []

        def look(stop: Any) -> None:
            wait = f"__import__('os').read({reader}, 1)"
            answers.append(s.engine.evaluate(stop.id, 0, wait, timeout=0.2).error)

        def look_at_main() -> None:
            stop = s.stopped()
            look(stop)
            answers.append(s.engine.evaluate(stop.id, 0, "x", timeout=DEADLINE).text)
            s.go(stop)

        other = threading.Thread(target=look_at_main)
        s.engine._busy.add(0)
        other.start()
        assert guest.plain(1) == 4
        other.join(DEADLINE)
        assert "no answer" in answers[0] and answers[1] == "1", answers
        thread = Running(guest.plain, 1)
        stop = s.stopped()
        look(stop)
        s.go(stop)
        s.go(stop)  # once more: it has not gone on
        Running(str, guest.plain).ended()  # a thread that begins, and calls functions
        assert not s.engine.stops() and thread.thread.is_alive()
        os.write(writer, b"x")
        assert thread.ended() == 4
        os.close(reader)
        os.close(writer)


def interrupt_of_the_main_thread() -> None:
    """Ctrl-C, or the interrupt of a cell, while the main thread is stopped: raised in the user's code."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with session() as s:
            s.engine._busy.clear()
            s.break_at("interruptible")
            events: list[Any] = []

            def interrupt() -> None:
                events.append(s.events.get(timeout=DEADLINE))
                signal.raise_signal(signal.SIGINT)
                events.append(s.events.get(timeout=DEADLINE))

            other = threading.Thread(target=interrupt)
            s.engine._busy.add(0)
            other.start()
            assert guest.interruptible() == "interrupted"
            other.join(DEADLINE)
            assert isinstance(events[1], Resumed) and events[1].how == "interrupt"
            settle()

            # The next stop is as any other, in the middle of an evaluation as well.
            def interrupt_evaluation() -> None:
                stop = s.stopped()
                answer = _raised(KeyError, s.engine.evaluate, stop.id, 0, "__import__('signal').raise_signal(2)")
                assert "interrupted" in answer, answer
                events.append("done")

            other = threading.Thread(target=interrupt_evaluation)
            other.start()
            assert guest.interruptible() == "interrupted"
            other.join(DEADLINE)
            assert events[-1] == "done"
    finally:
        signal.signal(signal.SIGINT, previous)


def short_forms() -> None:
    class Tall:
        def __repr__(self) -> str:
            return "x\n" * 1000

    class Bad:
        def __repr__(self) -> str:
            raise ValueError("no")

        def __len__(self) -> int:
            raise ValueError("no")

    class Named(dict[str, int]):
        pass

    values: list[Any] = [
        1, 10**5000, "x" * 10_000, b"x" * 10_000, bytearray(10_000), list(range(10_000)), {i: i for i in range(10_000)},
        set(range(1000)), Tall(), Bad(), Named(a=1), object(), [Bad()], None, ..., 1.5, int, len, sys, range(10**9),
    ]  # fmt: skip
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    loop: list[Any] = []
    loop.append(loop)
    for value in [*values, deep, loop]:
        text = short(value)
        assert 0 < len(text) <= SHORT and "\n" not in text, text
        assert len(long(value)) <= LONG
        named, indexed = counts(value)
        assert len(children(value, 0, 10)) == min(10, named + indexed), value
    assert short(10**5000) == "<int of 16610 bits>"
    assert "whose repr raised ValueError" in short(Bad())
    assert short([1, "two", {3: None}]) == "[1, 'two', {3: None}]"
    assert children({"a": 1}) == [("'a'", "a", 1)]
    # An array is told by its attributes.
    numpy = type("ndarray", (), {"__module__": "numpy", "shape": (1000, 1000), "dtype": "float32"})
    assert short(numpy()) == "array(shape=(1000, 1000), dtype=float32)"
    tensor: Any = type(
        "Tensor", (), {"__module__": "torch", "shape": (2,), "dtype": "torch.float32", "device": "cuda:0"}
    )
    assert short([tensor()]) == "[tensor(shape=(2,), dtype=torch.float32, device='cuda:0')]"
