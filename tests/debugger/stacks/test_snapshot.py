"""The snapshot that a process takes of its threads and tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest

from monarch_kernel.debugger.model.stops import INNER_FRAMES, OUTER_FRAMES, TASK, THREAD, Stack, StackSnapshot
from monarch_kernel.debugger.rank.stacks import MOST_VALUES, VALUE_LENGTH, snapshot, thread_name, value_text
from monarch_kernel.debugger.source_locations import USER
from tests.conftest import wait_until
from tests.waiting import patience


class Gate:
    def __init__(self) -> None:
        self.waiting = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.waiting.release()
        self.opened.wait(patience(60))


@contextmanager
def threads(work: Callable[[Gate], Any], *names: str) -> Generator[Gate]:
    """Threads that run `work` until they wait at the gate."""
    gate = Gate()
    started = [threading.Thread(target=work, args=(gate,), name=name) for name in names]
    for thread in started:
        thread.start()
    try:
        for _ in started:
            assert gate.waiting.acquire(timeout=20)
        yield gate
    finally:
        gate.opened.set()
        for thread in started:
            thread.join(patience(20))


def named(found: StackSnapshot, name: str) -> Stack:
    (stack,) = [stack for stack in found.stacks if stack.name == name]
    return stack


def outer(gate: Gate) -> None:
    inner(gate)


def inner(gate: Gate) -> None:
    gate()


def test_a_thread_begins_with_its_own_code() -> None:
    with threads(outer, "mine-1"):
        stack = named(snapshot(), "mine")
    assert stack.kind == THREAD and stack.thread
    names = [frame.place.name for frame in stack.frames]
    assert names[:3] == ["outer", "inner", "Gate.__call__"]
    assert "Event.wait" in names[3:]
    first = stack.frames[0]
    assert (first.place.file, first.place.kind, first.source) == (__file__, USER, "inner(gate)")
    assert first.span == (0, 0)  # all of the line
    assert all(frame.source == "" for frame in stack.frames if not frame.user)


def test_the_part_of_a_line_that_runs() -> None:
    def work(gate: Gate) -> object:
        return [None, gate()]

    with threads(work, "mine"):
        frame = named(snapshot(), "mine").frames[0]
    assert frame.source == "return [None, gate()]"
    assert frame.source[slice(*frame.span)] == "gate()"


def test_threads_without_code_of_the_user_s_are_counted_unless_asked_for() -> None:
    event = threading.Event()
    thread = threading.Thread(target=event.wait, args=(60,), name="a-library-s")
    thread.start()
    try:
        few, many = snapshot(), snapshot(all_threads=True)
    finally:
        event.set()
        thread.join()
    assert few.hidden >= 1 and "a-library-s" not in [stack.name for stack in few.stacks]
    assert many.hidden == 0 and "a-library-s" in [stack.name for stack in many.stacks]


def test_the_thread_that_asks_is_left_out() -> None:
    found: list[StackSnapshot] = []
    asks = threading.Thread(target=lambda: found.append(snapshot()), name="asks")
    asks.start()
    asks.join(patience(20))
    assert "asks" not in [stack.name for stack in found[0].stacks]


def test_a_recursion_is_one_frame() -> None:
    def down(gate: Gate, depth: int = 300) -> None:
        if depth:
            down(gate, depth - 1)
        else:
            gate()

    with threads(down, "mine"):
        frames = named(snapshot(), "mine").frames
    assert [frame.times for frame in frames[:3]] == [300, 1, 1]


def test_the_middle_of_a_very_deep_stack_is_left_out() -> None:
    def one(gate: Gate, depth: int) -> None:
        other(gate, depth) if depth else gate()

    def other(gate: Gate, depth: int) -> None:
        one(gate, depth - 1)

    with threads(lambda gate: one(gate, 200), "mine"):
        frames = named(snapshot(), "mine").frames
    assert len(frames) == OUTER_FRAMES + INNER_FRAMES
    assert frames[OUTER_FRAMES].left_out > 200
    assert frames[-1].place.name == "Condition.wait"


def test_local_variables_only_when_asked_for() -> None:
    with threads(outer, "mine"):
        assert named(snapshot(), "mine").values == ()
        assert dict(named(snapshot(values=True), "mine").values) == {}  # of __call__, which has none but self

    def work(gate: Gate) -> object:
        number, items, gone = 7, [1, "two", None, 4, 5], object()
        gate.waiting.release()
        return gate.opened.wait(60), number, items, gone

    with threads(work, "mine"):
        values = dict(named(snapshot(values=True), "mine").values)
    assert values == {"gate": "<Gate>", "number": "7", "items": "[1, 'two', None, 4, …]", "gone": "<object>"}


def test_a_task_that_waits_and_one_that_runs() -> None:
    gate = Gate()

    async def computes() -> None:
        gate()

    async def waits() -> None:
        await asyncio.sleep(60)

    async def both() -> None:
        waiting = asyncio.create_task(waits(), name="patient")
        await asyncio.sleep(0)
        await computes()
        waiting.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(both()), name="loop")
    thread.start()
    try:
        assert gate.waiting.acquire(timeout=20)
        found = snapshot()
    finally:
        gate.opened.set()
        thread.join(patience(20))
    patient = named(found, "patient")
    assert [frame.place.name.rpartition(".")[2] for frame in patient.frames] == ["waits", "sleep"]
    assert patient.thread == 0
    # The thread's own stack has the task in it, below what has started the loop.
    loop = named(found, "loop")
    names = [frame.place.name.rpartition(".")[2] for frame in loop.frames if frame.user]
    assert names == ["<lambda>", "both", "computes", "__call__"]
    assert not [stack for stack in found.stacks if "both" in stack.name]


def test_a_loop_s_main_task_goes_on_from_where_the_loop_was_started() -> None:
    waiting = threading.Event()
    opened = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def deep() -> None:
        waiting.set()
        await opened.wait()

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await deep()

    def start() -> None:
        asyncio.run(main())

    thread = threading.Thread(target=start, name="loop")
    thread.start()
    try:
        assert waiting.wait(patience(20))
        # It has said so just before it begins to wait.
        wait_until(lambda: "deep" in str(named(snapshot(), "loop").frames[-2].place.name), "it waits")
        found = snapshot()
    finally:
        loops[0].call_soon_threadsafe(opened.set)
        thread.join(patience(20))
    names = [frame.place.name.rpartition(".")[2] for frame in named(found, "loop").frames]
    assert names == ["start", "run", "run", "run_until_complete", "main", "deep", "wait"]
    assert not [stack for stack in found.stacks if stack.kind == TASK]


def test_it_is_taken_while_threads_come_and_go() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            threading.Thread(target=lambda: None).start()

    churning = [threading.Thread(target=churn, name="churn") for _ in range(3)]
    for thread in churning:
        thread.start()
    try:
        for _ in range(100):
            found = snapshot(all_threads=True, values=True)
            assert all(stack.frames for stack in found.stacks)
    finally:
        stop.set()
        for thread in churning:
            thread.join()


class Evil:
    """Nobody may run its code."""

    def __repr__(self) -> str:
        raise AssertionError("__repr__ was called")

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    __str__ = __repr__


class EvilList(list[int]):
    def __iter__(self) -> Any:
        raise AssertionError("__iter__ was called")

    __len__ = __iter__
    __repr__ = __iter__


def test_values_as_text_run_no_code_of_the_user_s() -> None:
    assert value_text(Evil()) == "<Evil>"
    assert value_text([Evil()]) == "[<Evil>]"
    assert value_text(EvilList([1])) == "<EvilList>"


@pytest.mark.parametrize(
    "value, text",
    [
        (3, "3"),
        (None, "None"),
        ("a\nb", "'a\\nb'"),
        (1 << 4000, "an int of 4001 bits"),
        ((1,), "(1,)"),
        ({}, "{}"),
        ({"a": [1, 2]}, "{'a': [1, 2]}"),
        ([[[1]]], "[[<list of 1>]]"),
        ({1, 2}, "{1, 2}"),
    ],
)
def test_values_as_text(value: object, text: str) -> None:
    assert value_text(value) == text


def test_values_as_text_are_short() -> None:
    assert len(value_text("x" * 10_000)) <= VALUE_LENGTH
    assert len(value_text({str(at): "y" * 100 for at in range(100)})) <= VALUE_LENGTH
    assert MOST_VALUES < 100


def test_arrays_as_text() -> None:
    numpy = pytest.importorskip("numpy")
    assert value_text(numpy.zeros((2, 3), "float32")) == "<ndarray float32 [2, 3]>"


@pytest.mark.parametrize(
    "name, shown",
    [
        ("Thread-12 (load)", "load"),
        ("Thread-12", "Thread"),
        ("ThreadPoolExecutor-0_11", "ThreadPoolExecutor"),
        ("asyncio_3", "asyncio"),
        ("Dummy-7", "a thread of native code"),
        ("MainThread", "MainThread"),
        ("", "a thread without a name"),
    ],
)
def test_names_of_threads_are_those_of_all_ranks(name: str, shown: str) -> None:
    assert thread_name(name) == shown
