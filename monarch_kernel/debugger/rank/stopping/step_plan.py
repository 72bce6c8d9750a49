"""Decide where a step ends. A plan follows one thread, or one coroutine, from event to event. Independent of tracing.

A step belongs to a *flow*: a thread's stack down to the start of user code, or a task's coroutines down to the event
loop. Other tasks of the thread do not end it. When the flow leaves user code, the step is over, and the thread
continues.
"""

from __future__ import annotations

from types import FrameType

from monarch_kernel.debugger.model.stops import How
from monarch_kernel.debugger.source_locations import CELL_RUNNER, RUNTIME, is_user_frame, kind_of, outwards

# Files of code in which threads begin or wait. It never stops.
_MACHINERY = ("threading.py", "queue.py", "concurrent/futures/thread.py")
_EVENT_LOOP = ("/asyncio/", "/uvloop/")


def forbidden(filename: str) -> bool:
    """Return whether code of a file must never stop: that of this package, and that of threads and imports."""
    return filename.startswith("<frozen ") or kind_of(filename) == RUNTIME or filename.endswith(_MACHINERY)


def _flow_of(frame: FrameType) -> FrameType:
    """Return the outermost frame of a frame's flow."""
    found = frame
    for outer in outwards(frame.f_back):
        name = outer.f_code.co_filename
        if forbidden(name) or any(part in name for part in _EVENT_LOOP):
            break
        found = outer
    return found


class StepPlan:
    """The plan by which one thread continues from a stop to the next.

    Args:
        frame: the current frame; for `next` and `until`, also the frame whose lines count.
        how: next, step, out or until.
        line: for until: the line to reach in `frame`; 0 is any line below the current one.
        stop: the id of the stop at which it began.

    Attributes:
        thread: the thread whose lines count.
        everywhere: whether lines of all frames of the thread matter, not only those of `frames`.
        libraries: whether lines of libraries matter, too, because the step begins in one.
        moved: whether `frames` or `everywhere` have changed; the tracer resets it after adapting the events.
        over: whether no event will end this step.
    """

    def __init__(self, thread: int, frame: FrameType, how: How, line: int = 0, stop: int = 0) -> None:
        self.thread = thread
        self.stop = stop
        self.how: How = how
        self.everywhere = how == "step"
        self.libraries = not is_user_frame(frame)
        self.moved = False
        self.over = False
        self._home: FrameType | None = frame
        self._until = line or frame.f_lineno + 1
        self._flow = _flow_of(frame)
        self._callers: dict[int, FrameType] = {}  # by identity: the frames that get control when `frame` ends
        self._root = frame
        for outer in outwards(frame.f_back):
            if forbidden(outer.f_code.co_filename):
                break
            self._root = outer
            if self._stops_in(outer):
                self._callers[id(outer)] = outer
        outermost = next(reversed(self._callers.values()), frame).f_code
        self._cell = outermost.co_filename if outermost.co_name == "<module>" else None
        self._in_rest_of_cell = False

    @property
    def frames(self) -> list[FrameType]:
        """Return the frames whose lines and returns matter."""
        return [*self._callers.values(), self._root, *([self._home] if self._home is not None else [])]

    def at_line(self, frame: FrameType, line: int) -> bool:
        """Return whether the step ends at a line that is about to run."""
        if frame is self._home:
            return self.how in ("next", "step") or (self.how == "until" and line >= self._until)
        if id(frame) in self._callers:
            return True
        if self._in_rest_of_cell:
            return self._continues_cell(frame)
        if not self.everywhere or not self._stops_in(frame):
            return False
        return _flow_of(frame) is self._flow or any(outer is self._home for outer in outwards(frame))

    def at_return(self, frame: FrameType) -> FrameType | None:
        """Handle that a frame is about to return. Return the caller in which the step ends, if it does."""
        if frame is self._home:
            caller = frame.f_back
            if caller is None or forbidden(caller.f_code.co_filename):
                self._leave(frame)
                return None
            if self._stops_in(caller):
                return caller
            # Library code has called user code: the step ends where user code gets control again.
            self._home, self.how, self.moved = caller, "out", True
        elif frame is self._root:
            self.over = True
        return None

    def at_unwind(self, frame: FrameType) -> None:
        """Handle that an exception leaves a frame."""
        if frame is self._root:
            self.over = True

    def _stops_in(self, frame: FrameType) -> bool:
        return is_user_frame(frame) or (self.libraries and not forbidden(frame.f_code.co_filename))

    def _leave(self, frame: FrameType) -> None:
        """Handle that user code has ended. The rest of the same cell may follow."""
        runner = next((outer for outer in outwards(frame.f_back) if _runs_cells(outer)), None)
        if runner is None or self._cell is None:
            self.over = True
            return
        self._in_rest_of_cell = True
        self._home, self._root, self._callers = None, runner, {}
        self.everywhere = self.moved = True

    def _continues_cell(self, frame: FrameType) -> bool:
        code = frame.f_code
        if code.co_name != "<module>" or code.co_filename != self._cell:
            return False
        return any(outer is self._root for outer in outwards(frame))


def _runs_cells(frame: FrameType) -> bool:
    """Return whether a frame runs a cell as two pieces of code: its statements, then its last expression."""
    return frame.f_code.co_name == "run" and frame.f_code.co_filename.endswith(CELL_RUNNER)
