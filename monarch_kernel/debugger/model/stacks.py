"""The stacks of a rank, with the cell, endpoint or task of each. Plain values; named tuples, which pickle fast."""

from __future__ import annotations

from typing import NamedTuple

from monarch_kernel.debugger.source_locations import USER, SourceLocation

#: What a stack belongs to.
CODE = "code"  # a cell, or what else a tool runs for the user
ENDPOINT = "endpoint"  # of one of the user's actors
PROGRAM = "program"  # the main thread of a job's own program
OPERATION = "operation"  # on a tensor, that a controller has issued
TASK = "task"  # of asyncio
THREAD = "thread"  # the user's, or a library's

NATIVE = "native"  # a kind of code, beside those of `source_locations`

#: The frames of one stack that are sent, at most: so many at its outer end, so many at its inner one.
OUTER_FRAMES, INNER_FRAMES = 40, 160


class StackFrame(NamedTuple):
    """One frame of a stack.

    Attributes:
        place: file, line, function, and the kind of code.
        source: the line of user code without its indentation; '' where it is not known, or not user code.
        span: the columns of `source` that run now (from, to); (0, 0) where that is not known, or is all of it.
        times: how often it calls itself, in a recursion.
        left_out: how many frames before this one were left out of a very deep stack.
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
        name: `actor.endpoint`, the operation, or the name of the task or thread (without what differs between ranks).
        frames: from the outermost to the innermost.
        thread: the identifier of its thread (`threading.get_ident`); 0 for a task that waits.
        state: what is special about it, as a phrase: it is stopped, or holds the interpreter lock, for instance.
        cell: the id of the notebook's cell that has called the endpoint; "" for none.
        values: local variables of the innermost frame of user code, as text; only if asked for.
        issued: of an operation, the engine and the record: the controller knows which of its lines issued that.
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
    """What one rank is doing. Without stacks it is idle, waiting for a message.

    Attributes:
        pid: the process.
        stacks: those of user code, or all.
        hidden: how many other threads there are.
        outside: py-spy has read it, since the rank did not answer; it has no asyncio tasks.
        note: what is wrong with the rank, as a clause; '' if nothing.
    """

    pid: int
    stacks: tuple[Stack, ...]
    hidden: int = 0
    outside: bool = False
    note: str = ""
