"""What moves over some time and what does not."""

from __future__ import annotations

import threading

import pytest

from monarch_kernel.debugger.model.stops import ENDPOINT, TASK, Stack, StackFrame, StackSnapshot
from monarch_kernel.debugger.rank.stacks import MOVES, combined, sample
from monarch_kernel.debugger.source_locations import USER, SourceLocation


def stack(*lines: tuple[str, int], name: str = "a.f", thread: int = 5, kind: str = ENDPOINT) -> Stack:
    frames = tuple(StackFrame(SourceLocation("/w/a.py", line, function, USER), "x") for function, line in lines)
    return Stack(kind, name, frames, thread)


def taken(*stacks: Stack) -> StackSnapshot:
    return StackSnapshot(1, stacks)


def only(snapshot: StackSnapshot) -> tuple[list[tuple[str, int]], str]:
    (found,) = snapshot.stacks
    return [(frame.place.name, frame.place.line) for frame in found.frames], found.state


def test_what_stays() -> None:
    same = taken(stack(("f", 1), ("g", 2)))
    assert only(combined([same] * 3, 2)) == ([("f", 1), ("g", 2)], "has not moved for 2 s")


def test_a_thread_that_uses_the_processor_does_not_hang() -> None:
    same = taken(stack(("f", 1)))
    assert only(combined([same] * 3, 2, {5})) == ([("f", 1)], "computes at the same place")


@pytest.mark.parametrize(
    "first, last, common",
    [
        ([("f", 1), ("g", 2)], [("f", 1), ("h", 7)], [("f", 1)]),
        ([("f", 1), ("g", 2)], [("f", 1), ("g", 3)], [("f", 1), ("g", 0)]),
        ([("f", 1), ("g", 2)], [("f", 1)], [("f", 1)]),
        ([("f", 1)], [("f", 1), ("g", 2)], [("f", 1)]),
        ([("f", 1)], [("g", 1)], []),
    ],
)
def test_what_moves_ends_where_it_does(
    first: list[tuple[str, int]], last: list[tuple[str, int]], common: list[tuple[str, int]]
) -> None:
    assert only(combined([taken(stack(*first)), taken(stack(*last))], 2)) == (common, MOVES)


def test_another_call_is_no_standstill() -> None:
    begun = combined([taken(), taken(stack(("f", 1)))], 2)
    assert only(begun)[1] == MOVES
    other = combined([taken(stack(("f", 1), name="a.g")), taken(stack(("f", 1)))], 2)
    assert only(other)[1] == MOVES
    assert combined([taken(stack(("f", 1))), taken()], 2).stacks == ()


def test_threads_and_tasks_of_one_name_are_told_apart() -> None:
    first = taken(stack(("f", 1), thread=5), stack(("f", 1), thread=6), stack(("t", 1), kind=TASK, thread=0))
    last = taken(stack(("f", 1), thread=5), stack(("f", 2), thread=6), stack(("t", 1), kind=TASK, thread=0))
    states = [each.state for each in combined([first, last], 1).stacks]
    assert states == ["has not moved for 1 s", MOVES, "has not moved for 1 s"]


def test_a_state_that_says_more_stays() -> None:
    stopped = taken(stack(("f", 1))._replace(state="stopped: breakpoint 1"))
    assert only(combined([stopped, stopped], 1))[1] == "stopped: breakpoint 1"


def test_real_threads() -> None:
    stop = threading.Event()

    def waits() -> None:
        stop.wait(60)

    def computes() -> None:
        while not stop.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=work, name=work.__name__) for work in (waits, computes)]
    for thread in threads:
        thread.start()
    try:
        found = {each.name: each for each in sample(0.5).stacks}
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert found["waits"].state == "has not moved for 0.5 s"
    # However it was seen: what uses the processor is not said to stand still.
    assert found["computes"].state in (MOVES, "computes at the same place")
