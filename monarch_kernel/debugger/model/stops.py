"""What crosses between a stop engine and whoever drives it: breakpoints in, stops and values out.

Plain values that pickle; the standard library is all they need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

How = Literal["continue", "next", "step", "out", "until"]
"""How a stopped thread goes on: run; to the next line here, into calls, or of the caller; past a line."""

Reason = Literal["breakpoint", "step", "pause", "breakpoint()", "exception", "post mortem"]

ANY_ERROR = "*"


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Where to stop, and when.

    Attributes:
        id: whose; `Bound` and `Stop.breakpoint` say it again. Greater than 0.
        file: a path, or the name that a cell was compiled under; see `source_locations.same_file` for what matches.
        line: 1-based. On a line without code, the next line of the same function that has some.
        condition: an expression of the frame; stop if it is true. One that raises stops, too, and says so.
        hits: stop at the hit of that number and at all that follow; 0 is 1. Hits count where the condition holds.
        first: only the first rank that gets here stops (the engine asks; see `StopEngine`).
        differs: an expression; stop where ranks disagree on its value (the engine asks).
        error: instead of a line: the name of an exception class (or of a class it derives from), bare or with its
            module, or `ANY_ERROR`: stop where an endpoint or a cell has failed with it.
        log: text to print in place of a stop; `{expression}` in it is evaluated.
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


@dataclass(frozen=True, slots=True)
class Bound:
    """What became of a breakpoint in one process.

    Attributes:
        id: the breakpoint's.
        verified: code with that line is loaded. Where it is not, the breakpoint takes hold as soon as such code runs.
        line: where it will stop, which may be after the line that was asked for.
        message: why it is not verified, or what else there is to know (on Python 3.11: what it costs); "" if nothing.
    """

    id: int
    verified: bool
    line: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stopped thread.

    Attributes:
        index: 0 is the innermost.
        name: the function's qualified name; `<module>` at the top level of a file or cell.
        file: as the code was compiled under.
        line: 1-based, the line that runs next (in frames further out: the line of the call).
        user: code of the user; not ours, nor of the standard library or an installed package.
        source: the text of the line without its indentation, "" where there is none.
    """

    index: int
    name: str
    file: str
    line: int
    user: bool
    source: str


@dataclass(frozen=True, slots=True)
class Stop:
    """A stopped thread, or the kept traceback of an error.

    Attributes:
        id: grows from 1; never used again in this process.
        reason: see `Reason`.
        text: what to tell a person beside the reason: the error, how a condition failed, or what `stop_here` was given.
        breakpoint: the id of the breakpoint that was hit, or 0.
        thread: its `threading.get_ident()`; 0 where there is none (post mortem).
        thread_name: its name.
        frames: innermost first.
        actor: the actor whose endpoint runs there, "" outside of any.
        endpoint: that endpoint.
        cell: the id of the cell for which it runs.
        since: `time.time()` when it stopped.
        steppable: it can go on by next, step, out and until; an error's frames have ended, and can only be looked at.
    """

    id: int
    reason: Reason
    text: str
    breakpoint: int
    thread: int
    thread_name: str
    frames: tuple[Frame, ...]
    actor: str
    endpoint: str
    cell: str
    since: float
    steppable: bool


@dataclass(frozen=True, slots=True)
class Variable:
    """A value under a name.

    Attributes:
        name: a variable, attribute, index or key.
        value: its short form, bounded in length.
        type: the name of its class.
        ref: asks for its children (`StopEngine.variables`) as long as the stop lasts; 0 if it has none.
        named: how many children have names or keys.
        indexed: how many have an index; they come before those with names, and can be asked for in pages.
    """

    name: str
    value: str
    type: str
    ref: int = 0
    named: int = 0
    indexed: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an expression gave, as `Variable` has it; `error` says in one line what it raised ("" if nothing)."""

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
    """Event: that stop is over.

    Attributes:
        stop: its id.
        how: how it went on: as in `How`, or "interrupt" where an exception was raised into the thread. A step that then
            ended without another stop, because the user's code had returned, is told of once more, as "ran off".
    """

    stop: int
    how: str = "continue"


class NotSteppable(RuntimeError):
    """The stop cannot go on like that, or nothing can be run in it: its frames have ended."""


__all__ = [
    "ANY_ERROR",
    "Bound",
    "Breakpoint",
    "Evaluation",
    "Frame",
    "How",
    "NotSteppable",
    "Reason",
    "Resumed",
    "Stop",
    "Stopped",
    "Variable",
]
