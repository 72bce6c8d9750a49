"""Which frames are shown of a stop, and which stops are one group: the same for all viewers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.debugger.commands.console import Console, StopSelection
from monarch_kernel.debugger.controller.sets import StopSet
from monarch_kernel.debugger.events import frames_of_a_stack, frames_of_an_ide, shown_frame, user_frames
from monarch_kernel.debugger.frontend import Frontend
from monarch_kernel.debugger.model.stops import StopFrame
from tests.debugger.memory import FRAMES, MemoryDebugger

LIBRARY = "/opt/lib/python3.11/site-packages/numpy/core.py"


def frames(*lines: tuple[str, int, bool]) -> tuple[StopFrame, ...]:
    return tuple(StopFrame(at, "f", file, line, user, "") for at, (file, line, user) in enumerate(lines))


def in_library(line: int, user_line: int = 3) -> tuple[StopFrame, ...]:
    """Stopped in a library that line `user_line` of `train.py` has called."""
    return frames((LIBRARY, line, False), ("/src/train.py", user_line, True))


def test_a_stop_is_shown_at_its_innermost_user_code() -> None:
    of_library = in_library(40)
    assert [shown_frame(of_library, up) for up in range(3)] == [of_library[1]] * 3
    assert [shown_frame(FRAMES, up) for up in range(3)] == [FRAMES[0], FRAMES[2], FRAMES[2]]
    assert user_frames(FRAMES) == [FRAMES[0], FRAMES[2]]
    assert shown_frame(()) is None


def test_a_stack_and_an_ide_show_what_is_between() -> None:
    assert frames_of_a_stack(FRAMES) == [FRAMES[0], FRAMES[2]]
    assert frames_of_a_stack(in_library(40)) == list(in_library(40))
    assert frames_of_an_ide(FRAMES) == list(FRAMES[:3])
    ours = FRAMES[3:]
    assert frames_of_a_stack(ours) == frames_of_an_ide(ours) == user_frames(ours) == list(ours)


def groups(debugger: MemoryDebugger) -> tuple[list[list[int]], list[list[int]]]:
    """The groups of ranks at a prompt, and those of a set."""
    at_prompt = [[at.rank for at in group] for group in StopSelection(debugger, Frontend()).groups()]
    of_set = [[at.rank for at in group.stops] for group in StopSet(debugger, debugger.stops()).groups]
    return at_prompt, of_set


@pytest.mark.parametrize(
    "one, other, together",
    [
        pytest.param({"frames": in_library(40)}, {"frames": in_library(41)}, True, id="in a library that both called"),
        pytest.param(
            {"frames": in_library(40, 3)}, {"frames": in_library(40, 4)}, False, id="that they called elsewhere"
        ),
        pytest.param(
            {"reason": "step", "text": "f returned 1"}, {"reason": "step", "text": "f returned 2"}, True, id="returned"
        ),
        pytest.param(
            {"reason": "exception", "text": "ValueError: 1"},
            {"reason": "exception", "text": "ValueError: 2"},
            False,
            id="errors",
        ),
        pytest.param({"reason": "pause"}, {"reason": "breakpoint"}, True, id="paused on a breakpoint"),
    ],
)
def test_a_prompt_and_a_set_group_alike(one: dict[str, Any], other: dict[str, Any], together: bool) -> None:
    debugger = MemoryDebugger()
    debugger.stop(0, **one)
    debugger.stop(1, **other)
    at_prompt, of_set = groups(debugger)
    assert at_prompt == of_set == ([[0, 1]] if together else [[0], [1]])
    said: list[str] = []
    Console(debugger, said.append).run("groups")
    assert len([line for line in said[0].splitlines() if "train.py:" in line or "42.py:" in line]) == len(of_set)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "reason": st.sampled_from(["breakpoint", "step", "pause", "breakpoint()", "exception"]),
                "text": st.sampled_from(["", "a", "b"]),
                "frames": st.lists(
                    st.tuples(st.sampled_from(["/src/train.py", LIBRARY]), st.integers(1, 2), st.booleans()),
                    min_size=1,
                    max_size=3,
                ).map(lambda lines: frames(*lines)),
            }
        ),
        max_size=6,
    )
)
def test_they_group_alike_whatever_is_stopped(stops: list[dict[str, Any]]) -> None:
    debugger = MemoryDebugger()
    for rank, stop in enumerate(stops):
        debugger.stop(rank, **stop)
    at_prompt, of_set = groups(debugger)
    assert at_prompt == of_set
    assert sorted(rank for group in of_set for rank in group) == list(range(len(stops)))
