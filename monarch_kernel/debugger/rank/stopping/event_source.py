"""The interface between a stop engine and its source of events."""

from __future__ import annotations

from types import FrameType
from typing import Any, Protocol

from monarch_kernel.debugger.rank.stopping.armed import ArmedBreakpoint, ArmedBreakpoints
from monarch_kernel.debugger.rank.stopping.step_plan import StepPlan


class EventSink(Protocol):
    """Receives events, on the thread where they happen. Each method may block, and may raise into that thread.

    Attributes:
        alert: a step or a pause is in progress, so lines without breakpoints matter, too.
    """

    alert: bool

    def at_line(self, frame: FrameType, line: int, here: tuple[ArmedBreakpoint, ...]) -> None:
        """A line is about to run; `here` are its breakpoints."""
        ...

    def at_return(self, frame: FrameType, value: Any) -> None:
        """A frame is about to return a value."""
        ...

    def at_unwind(self, frame: FrameType) -> None:
        """An exception leaves a frame."""
        ...


class EventSource(Protocol):
    """Delivers events: `monitoring.Monitoring` or `tracing.Tracing`. Called with the engine's lock held.

    Attributes:
        note: a message for a user who sets a breakpoint; "" for none.
    """

    note: str

    def arm(self, book: ArmedBreakpoints) -> None:
        """Arm these breakpoints in place of all others."""
        ...

    def attend(self, plans: list[StepPlan], pausing: bool) -> None:
        """Deliver the events that these steps need, and all lines of user code while `pausing`."""
        ...

    def close(self) -> None:
        """Remove every trace and callback."""
        ...


__all__ = ["EventSink", "EventSource"]
