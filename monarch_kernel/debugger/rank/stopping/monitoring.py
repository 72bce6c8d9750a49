"""Deliver events through `sys.monitoring` (Python 3.12 and later).

Only code with breakpoints, and code that a step passes through, is instrumented. Other code runs at full speed once
each of its functions has run once. A separate tool id lets debugpy and coverage tools run at the same time.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType
from typing import TYPE_CHECKING, Any

from monarch_kernel.debugger.rank.stopping.armed import ArmedBreakpoints, Lines
from monarch_kernel.debugger.rank.stopping.lines import loaded_codes, tree
from monarch_kernel.debugger.rank.stopping.step_plan import StepPlan
from monarch_kernel.debugger.source_locations import is_user_code

if TYPE_CHECKING:
    from monarch_kernel.debugger.rank.stopping.tracer import StopTracer

monitoring: Any = getattr(sys, "monitoring", None)

_NAME = "monarch_kernel"
# 0, 1, 2 and 5 are reserved for a debugger, coverage, a profiler and an optimizer.
_TOOLS = (4, 3, 2, 1)


class Monitoring:
    """Arms lines and follows steps through `sys.monitoring`.

    Raises:
        RuntimeError: other tools use all ids.
    """

    #: A message for a user who sets a breakpoint; "" for none.
    note = ""

    def __init__(self, sink: StopTracer, _lock: threading.Lock) -> None:
        self._sink = sink
        self._book = ArmedBreakpoints(())
        self._lines: dict[int, tuple[CodeType, Lines]] = {}  # by identity: equal code may belong to another file
        self._stepped: dict[int, CodeType] = {}
        self._everywhere = self._libraries = False
        self._generation = 0
        self._tool: int | None = None

    def arm(self, book: ArmedBreakpoints) -> None:
        """Arm these breakpoints in place of all others, including in code that is already running."""
        self._book = book
        before = self._lines
        lines: dict[int, tuple[CodeType, Lines]] = {}
        if book.has_lines:
            for code in loaded_codes(book.wants):
                if here := book.lines_of(code):
                    lines[id(code)] = (code, here)
        self._lines = lines
        self._apply({key: code for key, (code, _) in before.items()}, restart=bool(book.has_lines or self._stepped))

    def attend(self, plans: list[StepPlan], pausing: bool) -> None:
        """Deliver the events of these steps, and all lines of user code while a pause is requested."""
        before = self._stepped
        codes = [frame.f_code for plan in plans for frame in plan.frames]
        self._stepped = {id(code): code for code in codes}
        self._everywhere = pausing or any(plan.everywhere for plan in plans)
        self._libraries = any(plan.everywhere and plan.libraries for plan in plans)
        self._apply(before, restart=bool(self._stepped or self._everywhere))

    def close(self) -> None:
        """Remove all instrumentation. All code runs at full speed again."""
        self._book = ArmedBreakpoints(())
        before = {key: code for key, (code, _) in self._lines.items()} | self._stepped
        self._lines, self._stepped, self._everywhere = {}, {}, False
        self._apply(before, restart=False)
        if self._tool is not None:
            monitoring.free_tool_id(self._tool)
            self._tool = None

    def _apply(self, before: dict[int, CodeType], restart: bool) -> None:
        """Set the interpreter's events to those that are needed now. `before` is the code that had events."""
        events = monitoring.events
        codes = before | {key: code for key, (code, _) in self._lines.items()} | self._stepped
        if self._tool is None:
            if not codes and not self._everywhere and not self._book.has_lines:
                return
            self._take_tool()
        tool = self._tool
        for key, code in codes.items():
            wanted = events.LINE if key in self._lines else 0
            if key in self._stepped:
                wanted |= events.LINE | events.PY_RETURN
            if monitoring.get_local_events(tool, code) != wanted:
                monitoring.set_local_events(tool, code, wanted)
        wanted = events.PY_START if self._book.has_lines else 0
        if self._everywhere:
            wanted |= events.LINE
        if self._stepped:
            wanted |= events.PY_UNWIND
        # A callback about to return DISABLE for the previous state must not do so: callbacks compare this number.
        self._generation += 1
        if monitoring.get_events(tool) != wanted:
            monitoring.set_events(tool, wanted)
        if restart:
            monitoring.restart_events()  # turns on events again that DISABLE has turned off

    def _take_tool(self) -> None:
        for tool in _TOOLS:
            if monitoring.get_tool(tool) is None:
                break
        else:
            taken = ", ".join(sorted(str(monitoring.get_tool(tool)) for tool in _TOOLS))
            raise RuntimeError(f"no id of sys.monitoring is free for breakpoints (used by {taken}); end one of them")
        monitoring.use_tool_id(tool, _NAME)
        self._tool = tool
        events = monitoring.events
        for event, callback in (
            (events.PY_START, self._on_start),
            (events.LINE, self._on_line),
            (events.PY_RETURN, self._on_return),
            (events.PY_UNWIND, self._on_unwind),
        ):
            monitoring.register_callback(tool, event, callback)

    # -- callbacks, on any thread, whose events are off meanwhile ------------------------------------

    def _on_start(self, code: CodeType, _offset: int) -> object:
        generation = self._generation
        book = self._book
        if book.wants(code.co_filename):
            for part in tree(code):
                if id(part) not in self._lines and (here := book.lines_of(part)):
                    self._lines[id(part)] = (part, here)
                    events = monitoring.get_local_events(self._tool, part) | monitoring.events.LINE
                    monitoring.set_local_events(self._tool, part, events)
        # There is no call between the comparison and the return, so that no other thread can arm in between.
        if generation == self._generation:
            return monitoring.DISABLE
        return None

    def _on_line(self, code: CodeType, line: int) -> object:
        generation = self._generation
        armed = self._lines.get(id(code))
        here = armed[1].get(line, ()) if armed is not None else ()
        if here or self._sink.alert:
            self._sink.at_line(sys._getframe(1), line, here)
            if here or id(code) in self._stepped:
                return None
            if self._everywhere and (self._libraries or is_user_code(code)):
                return None
        if generation == self._generation:
            return monitoring.DISABLE
        return None

    def _on_return(self, _code: CodeType, _offset: int, value: object) -> object:
        if self._sink.alert:
            self._sink.at_return(sys._getframe(1), value)

    def _on_unwind(self, _code: CodeType, _offset: int, _error: BaseException) -> object:
        if self._sink.alert:
            self._sink.at_unwind(sys._getframe(1))
