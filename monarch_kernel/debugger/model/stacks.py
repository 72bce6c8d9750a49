"""The stacks of a rank, with the cell, endpoint or task of each. Plain values; named tuples, which pickle fast."""

from __future__ import annotations

from typing import NamedTuple

from monarch_kernel.debugger.source_locations import USER, SourceLocation

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
