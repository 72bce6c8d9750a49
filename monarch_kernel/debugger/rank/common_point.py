"""Let a breakpoint (or a cell at a step) take effect at the same moment of the program on all ranks.

Ranks that exchange collectives are never all at the same line. Suppose that a breakpoint took effect on each rank when
its message arrived. One rank might then stop a step before the others, which would wait for it in a collective and
never reach the line. The number of collectives that the default process group has issued is the same on all ranks at
the same step. A point is such a number. Only the controller chooses it (``controller.common_point``).

From the moment when a point is open here (`opening`), each thread that reaches its line waits until the controller has
chosen the number. No thread can therefore be past it, whatever the number is. Before that number is reached,

* a line that the program will reach again (it is in a loop) is passed: the other ranks may have passed it, in this
  step, before they had the breakpoint;
* at any other line, the thread is held until the controller has evaluated the reports of all ranks (`Report`).

A rank decides on its own only if the controller is silent for `PATIENCE`. It then continues if nothing was decided, and
stops if it would not reach the line again.

The point belongs to the controller. This process keeps the decisions that it receives until the breakpoint is cleared,
or another viewer takes over (`forget`), which also releases held threads.
"""

from __future__ import annotations

import bisect
import re
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple

from monarch_kernel.debugger.source_locations import CELL_RUNNER, RUNTIME, is_user_frame, kind_of
from monarch_kernel.engines.join.progress_monitor import issued

#: The maximum time that a thread waits for the controller, which may have died (seconds).
PATIENCE = 10.0

#: The prefix of the names of points that do not belong to breakpoints.
OF_CELL = "cell "

# Event loops and imports run code that is not part of their own loop.
_LOOPS_OF_PYTHON = re.compile(r"^<frozen |[/\\]asyncio[/\\]\w+\.py$")
# After these, the next instruction in the code is not executed next.
_ENDS = {
    *("RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS", "JUMP_FORWARD"),
    *("JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
}

#: Whether a line is reached again: certainly, if the caller of its endpoint calls it again, or never.
AGAIN, IN_CALL, ONCE = "again", "in call", "once"


class Report(NamedTuple):
    """The report of a rank to the controller about an open point.

    Attributes:
        issued: the number of collectives that it has issued; None without a process group.
        runs: whether user code runs there.
        begun: whether the rank has reached the point.
        times: how often threads have reached the line since the last collective.
        held: the number of issued collectives at which a thread is held there; None if none is.
        once: whether that thread never reaches the line again; otherwise it may, with the next call of its endpoint.
    """

    issued: int | None
    runs: bool
    begun: bool
    times: int = 0
    held: int | None = None
    once: bool = False


@dataclass(slots=True)
class _Point:
    armed: bool = False
    decided: bool = False
    at: int | None = None  # None: from now on
    begun: bool = False
    gone: bool = False
    alone: bool = False  # the wait for the controller has timed out
    seen: int | None = None
    times: int = 0
    held: int | None = None
    once: bool = False
    passed: int = -1  # threads that are held after at most this many collectives are released


_points: dict[str, _Point] = {}
_changed = threading.Condition()


# -- requests of the controller ------------------------------------------------------------------------


@contextmanager
def opening(keys: Iterable[str]) -> Generator[None]:
    """Make threads that reach these points wait for the controller's decision, if it is not known yet.

    Inside the context, the lines are armed. `report` includes the points from then on.
    """
    with _changed:
        for key in keys:
            _points.setdefault(key, _Point())
    yield
    with _changed:
        for key in keys:
            if key in _points:
                _points[key].armed = True


def begin_anew(key: str) -> None:
    """Discard the decision about a point and wait for another one, because its process group is gone."""
    with _changed:
        if key in _points:
            _points[key] = _Point(armed=True)


def report(key: str) -> Report | None:
    """Report the local state of a point; None if it is not open (yet)."""
    from monarch_kernel.debugger.rank.stopping.lines import running_frames  # imported here because few agents need it

    point = _points.get(key)
    if point is None or not point.armed:
        return None
    now = issued()
    runs = any(is_user_frame(frame) for _, frame in running_frames())
    begun = point.begun or (point.decided and (point.at is None or now is None or now >= point.at))
    return Report(now, runs, begun, point.times if now == point.seen else 0, point.held, point.once)


def decide(key: str, at: int | None) -> None:
    """Apply the controller's decision: the point is reached when ``at`` collectives were issued; None: now."""
    with _changed:
        point = _points.setdefault(key, _Point())  # the decision may arrive before the message that opens the point
        point.decided, point.at = True, at
        point.begun = point.begun or at is None
        _changed.notify_all()


def let_past(key: str, count: int) -> None:
    """Release threads that are held, or arrive, with ``count`` collectives issued."""
    with _changed:
        if key in _points:
            _points[key].passed = count
        _changed.notify_all()


def agree_now(keys: Iterable[str]) -> None:
    """Mark these points as reached, on a rank that did not exist when they were decided."""
    for key in keys:
        point = _points.get(key)
        if point is None or not point.decided:
            decide(key, None)


def forget(keys: set[str]) -> None:
    """Drop all points of breakpoints except these."""
    for key in set(_points) - keys:
        if not key.startswith(OF_CELL):
            drop(key)


def drop(key: str) -> None:
    """Drop a point, and release the threads that are held there."""
    with _changed:
        point = _points.pop(key, None)
        if point is not None:
            point.gone = True
            _changed.notify_all()


# -- on the thread that comes to the line ----------------------------------------------------------------


def is_reached(key: str) -> bool:
    """Return whether the program has reached that point. May wait for the controller; any thread may call it."""
    point = _points.get(key)
    if point is None:
        return False
    if point.begun:
        return True
    with _changed:
        if not point.decided and not point.alone:
            point.alone = not _changed.wait_for(lambda: point.decided or point.gone, PATIENCE)
        if point.gone or not point.decided:
            return False
    now = issued()
    if point.at is None or now is None or now >= point.at:
        point.begun = True  # from now on, always
        return True
    again = _again(sys._getframe(1))
    with _changed:
        point.times = point.times + 1 if now == point.seen else 1
        point.seen = now
        if again == AGAIN:
            return False
        point.held, point.once = now, again == ONCE
        try:
            _changed.wait_for(
                lambda: point.gone or point.begun or point.passed >= now or (point.at or 0) <= now, PATIENCE
            )
        finally:  # also after an interrupt
            point.held = None
        return not point.gone and point.passed < now


def _again(frame: FrameType | None) -> str:
    """Return whether this thread will reach its position again, judging by its stack: `AGAIN`, `IN_CALL` or `ONCE`."""
    # imported here, as code that only stops threads does not need it
    from monarch_kernel.introspection import repeats_here

    threads: dict[int, threading.Thread] = getattr(threading, "_active", {})
    if isinstance(threads.get(threading.get_ident()), threading._DummyThread | None):
        return AGAIN  # C++ has started the thread and calls Python hooks in it, as autograd does in each step
    of_cell = False
    while frame is not None:
        file = frame.f_code.co_filename
        if kind_of(file) == RUNTIME:
            of_cell |= file.endswith(CELL_RUNNER)
        elif not _LOOPS_OF_PYTHON.search(file) and _in_loop(frame.f_code, frame.f_lasti):
            return AGAIN
        frame = frame.f_back
    return IN_CALL if repeats_here() and not of_cell else ONCE


@lru_cache(maxsize=1024)
def _in_loop(code: CodeType, at: int) -> bool:
    """Return whether an instruction (given its offset, or one within it) can be executed again within one call."""
    import dis

    steps = list(dis.get_instructions(code))
    places = {step.offset: index for index, step in enumerate(steps)}
    here = bisect.bisect_right([step.offset for step in steps], at) - 1
    seen, ahead = set[int](), [here]
    while ahead:
        index = ahead.pop()
        step = steps[index]
        following = [index + 1] if step.opname not in _ENDS and index + 1 < len(steps) else []
        # except the jump within an `await`
        if step.opcode in dis.hasjrel and step.opname != "JUMP_BACKWARD_NO_INTERRUPT":
            following.append(places[step.argval])
        if here in following:
            return True
        ahead += set(following) - seen
        seen.update(following)
    return False
