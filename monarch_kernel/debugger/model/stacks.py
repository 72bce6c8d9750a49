"""What a rank is doing, as plain values: its stacks, and who runs them; named tuples, which pickle fast."""

from __future__ import annotations

from typing import NamedTuple

from monarch_kernel.debugger.source_locations import USER, Place

#: What a stack belongs to.
CODE = "code"  # a cell, or what else a tool runs for the user
ENDPOINT = "endpoint"  # of one of the user's actors
TASK = "task"  # of asyncio
THREAD = "thread"  # the user's, or a library's

NATIVE = "native"  # a kind of code, beside those of `source_locations`

#: Frames of one stack that are sent: so many of its outer end, so many of its inner one.
OUTER_FRAMES, INNER_FRAMES = 40, 160


class StackFrame(NamedTuple):
    """One frame of a stack.

    Attributes:
        place: file, line, function, and whose code it is.
        source: the line of the user's code without its indentation, '' where it is not known or not the user's.
        span: which columns of `source` run now (from, to); (0, 0) where that is not known, or is all of it.
        times: how often it follows itself, for a recursion.
        left_out: how many frames were left out before this one, of a very deep stack.
    """

    place: Place
    source: str = ""
    span: tuple[int, int] = (0, 0)
    times: int = 1
    left_out: int = 0

    @property
    def user(self) -> bool:
        """Whether it is the user's code."""
        return self.place.kind == USER


class Stack(NamedTuple):
    """One stack of a rank: of a thread, or of an asyncio task with what it waits for.

    Attributes:
        kind: `ENDPOINT`, `CODE`, `TASK` or `THREAD`.
        name: `actor.endpoint`, the name of the task or of the thread (without what differs from rank to rank).
        frames: from the outermost to the innermost.
        thread: the identifier of its thread (`threading.get_ident`); 0 for a task that waits.
        state: what is special about it, as a phrase: that it is suspended, stopped, or holds the interpreter lock.
        cell: the notebook's cell that has called the endpoint, as the front end of that time knows it; "" for none.
        values: local variables of the innermost frame of the user's code, as text; only if asked for.
    """

    kind: str
    name: str
    frames: tuple[StackFrame, ...]
    thread: int = 0
    state: str = ""
    cell: str = ""
    values: tuple[tuple[str, str], ...] = ()


class Snapshot(NamedTuple):
    """What one rank is doing. Without stacks it is idle: it waits for a message.

    Attributes:
        pid: its process.
        stacks: those of the user's code, or all.
        hidden: how many threads there are beside.
        outside: py-spy has read it, since the rank did not answer; asyncio's tasks are not in it.
        note: what is wrong with the rank, as a clause; '' if nothing.
    """

    pid: int
    stacks: tuple[Stack, ...]
    hidden: int = 0
    outside: bool = False
    note: str = ""
