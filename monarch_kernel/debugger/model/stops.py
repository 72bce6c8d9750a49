"""The data that a rank's tracer and the controller exchange: breakpoints in, stops and values out.

Plain values that pickle. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from monarch_kernel.debugger.source_locations import USER, SourceLocation

# The stacks of a rank, with the cell, endpoint or task of each. Plain values; named tuples, which pickle fast.

#: The kinds of code that a stack belongs to.
CODE = "code"  # a cell, or other code that a tool runs for the user
ENDPOINT = "endpoint"  # an endpoint of one of the user's actors
PROGRAM = "program"  # the main thread of a job's own program
OPERATION = "operation"  # an operation on a tensor that a controller has issued
TASK = "task"  # a task of asyncio
THREAD = "thread"  # a thread of the user or of a library

NATIVE = "native"  # a kind of code, in addition to those of `source_locations`

#: The maximum number of frames of one stack that are sent, at its outer and at its inner end.
OUTER_FRAMES, INNER_FRAMES = 40, 160


class StackFrame(NamedTuple):
    """One frame of a stack.

    Attributes:
        place: file, line, function, and the kind of code.
        source: the line of user code without its indentation; '' if unknown, or not user code.
        span: the columns of `source` that are executing (from, to); (0, 0) if unknown, or the whole line.
        times: its recursion depth; 1 without recursion.
        left_out: the number of frames before this one that were left out of a very deep stack.
    """

    place: SourceLocation
    source: str = ""
    span: tuple[int, int] = (0, 0)
    times: int = 1
    left_out: int = 0

    @property
    def user(self) -> bool:
        """Whether it is user code."""
        return self.place.kind == USER


class Stack(NamedTuple):
    """One stack of a rank: of a thread, or of an asyncio task with its awaitable.

    Attributes:
        kind: `ENDPOINT`, `CODE`, `PROGRAM`, `OPERATION`, `TASK` or `THREAD`.
        name: `actor.endpoint`, the operation, or the name of the task or thread (without parts that differ between
            ranks).
        frames: from the outermost to the innermost.
        thread: the identifier of its thread (`threading.get_ident`); 0 for a task that waits.
        state: its special state, as a phrase: for example, it is stopped, or holds the GIL.
        cell: the id of the notebook cell that has called the endpoint; "" for none.
        values: local variables of the innermost frame of user code, as text; only on request.
        issued: for an operation, its engine and record, from which the controller finds the line that issued it.
    """

    kind: str
    name: str
    frames: tuple[StackFrame, ...]
    thread: int = 0
    state: str = ""
    cell: str = ""
    values: tuple[tuple[str, str], ...] = ()
    issued: tuple[str, int] | None = None


class StackSnapshot(NamedTuple):
    """The activity of one rank. A rank without stacks is idle: it waits for a message.

    Attributes:
        pid: the process.
        stacks: the stacks of user code, or all.
        hidden: the number of other threads.
        outside: whether py-spy has read it, because the rank did not answer; it then has no asyncio tasks.
        note: the problem of the rank, as a clause; '' if none.
    """

    pid: int
    stacks: tuple[Stack, ...]
    hidden: int = 0
    outside: bool = False
    note: str = ""


How = Literal["continue", "next", "step", "out", "until"]
"""How a stopped thread continues: run; to the next line here, into calls, or of the caller; past a line."""

Reason = Literal["breakpoint", "step", "pause", "breakpoint()", "exception", "post mortem"]

ANY_ERROR = "*"


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The location and the conditions of a stop.

    Attributes:
        id: its number, from 1, which `Bound` and `Stop.breakpoint` repeat.
        file: a path, or the name that a cell was compiled under; see `source_locations.matching_parts`.
        line: 1-based. For a line without code, the next line of the same function that has code.
        condition: an expression of the frame; stop if it is true. If it raises, stop as well, and report it.
        hits: stop at the hit of that number and at all later ones; 0 means 1. Only hits with a true condition count.
        first: only the first rank that arrives stops; the tracer asks the controller (see `StopTracer`).
        differs: an expression; stop if ranks disagree on its value; the tracer asks the controller.
        error: instead of a line: the name of an exception class (or of a base class of it), with or without its module,
            or `ANY_ERROR`: stop where an endpoint or a cell has failed with it.
        log: text to print instead of stopping; each `{expression}` in it is evaluated.
        together: identifies the point of the program from which it takes effect (`rank.common_point`); "": immediately.
    """

    id: int
    file: str = ""
    line: int = 0
    condition: str = ""
    hits: int = 0
    first: bool = False
    differs: str = ""
    error: str = ""
    log: str = ""
    together: str = ""


@dataclass(frozen=True, slots=True)
class Bound:
    """The state of a breakpoint in one process.

    Attributes:
        id: the id of the breakpoint.
        verified: whether code with that line is loaded. If not, the breakpoint takes effect as soon as such code runs.
        line: the line where it will stop, which may be after the requested line.
        message: why it is not verified, or a note (on Python 3.11: what it costs); "" if there is none.
    """

    id: int
    verified: bool
    line: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class StopFrame:
    """One frame of a stopped thread.

    Attributes:
        index: 0 is the innermost.
        name: the function's qualified name; `<module>` at the top level of a file or cell.
        file: the name that the code was compiled under; at the controller, the controller's name for a file that it
            synced.
        line: 1-based, the line that runs next (in outer frames: the line of the call).
        user: whether it is user code: not of this package, the standard library or an installed package.
        source: the text of the line without its indentation; "" if there is none.
        loaded: the name that the code was compiled under, if `file` is the controller's name for it; otherwise "".
    """

    index: int
    name: str
    file: str
    line: int
    user: bool
    source: str
    loaded: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """A stopped thread, or the kept traceback of an error.

    Attributes:
        id: a number that grows from 1 and is never reused in this process.
        reason: see `Reason`.
        text: details for the user besides the reason: the error, how a condition failed, the text of `stop_here`.
        breakpoint: the id of the breakpoint that was hit, or 0.
        thread: its `threading.get_ident()`; 0 if there is none (post mortem).
        thread_name: its name.
        frames: innermost first.
        actor: the actor whose endpoint runs there; "" for none.
        endpoint: that endpoint.
        cell: the id of the cell that it runs for.
        since: `time.time()` when it stopped.
        steppable: whether next, step, out and until work. The frames of an error have ended, and can only be inspected.
        of_peer: whether it is an error of a collective that another rank has caused, by failing or leaving.
    """

    id: int
    reason: Reason
    text: str
    breakpoint: int
    thread: int
    thread_name: str
    frames: tuple[StopFrame, ...]
    actor: str
    endpoint: str
    cell: str
    since: float
    steppable: bool
    of_peer: bool = False


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An exception that ended an endpoint or a cell, and whose frames a rank keeps.

    Attributes:
        key: the id of the cell that it ran for; without one, the actor and the endpoint. Equal on all ranks.
        text: the error, as in `Stop`.
        actor: the actor whose endpoint failed.
        endpoint: that endpoint.
        cell: the id of the cell; "" for none.
        age: how long ago it failed (seconds).
        of_peer: see `Stop`.
    """

    key: str
    text: str
    actor: str
    endpoint: str
    cell: str
    age: float
    of_peer: bool


@dataclass(frozen=True, slots=True)
class Variable:
    """A value under a name.

    Attributes:
        name: a variable, attribute, index or key.
        value: its short form, bounded in length.
        type: the name of its class.
        ref: identifies it in requests for its children (`StopTracer.variables`) while the stop lasts; 0 if it has none.
        named: how many children have names or keys.
        indexed: how many children have an index; they come before those with names, and can be requested in pages.
    """

    name: str
    value: str
    type: str
    ref: int = 0
    named: int = 0
    indexed: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The value of an expression, as in `Variable`. `error` is its exception in one line ("" if none)."""

    text: str
    type: str = ""
    ref: int = 0
    named: int = 0
    indexed: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Event: a thread has stopped (or a post mortem was opened)."""

    stop: Stop


@dataclass(frozen=True, slots=True)
class Resumed:
    """Event: a stop is over.

    Attributes:
        stop: its id.
        how: the way in which it continued: as in `How`, or "interrupt" if an exception was raised into the thread. If a
            step then ends without another stop, because user code has returned, a second event follows, with "ran off".
    """

    stop: int
    how: str = "continue"


class NotSteppable(RuntimeError):
    """The stop cannot step, and no code can run in it, because its frames have ended."""
