"""Notices about stopped ranks, shown in the cell that the ranks run for, as long as they are stopped.

If the cell is unknown (a thread that user code started, the cell of an earlier kernel), the cell that set the
breakpoint shows the notice, or else the next `%mesh debug`. No other cell shows it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch_kernel import debugger as debuggers
from monarch_kernel.kernel.output.cell_output import CellOutput
from monarch_kernel.subscriptions import Subscription

if TYPE_CHECKING:
    from monarch_kernel.debugger.commands.stop_text import Label
    from monarch_kernel.debugger.controller.hub import MeshDebugger
    from monarch_kernel.debugger.events import RankStop
    from monarch_kernel.kernel.notebook import Notebook

log = logging.getLogger(__name__)

#: Stops that arrive within this time of one another are shown together (seconds), unless no more can arrive.
SETTLE = 0.4
#: The maximum delay of the first of them (seconds).
LONGEST = 2.0


@dataclass(frozen=True, slots=True)
class StopNotice:
    """The ranks of one cell that are stopped now.

    Attributes:
        cell: the key of the cell; "" if it is unknown.
        stops: the live stops.
    """

    cell: str
    stops: tuple[RankStop, ...]


def notices_of(stops: Iterable[RankStop], setters: Mapping[int, str]) -> list[StopNotice]:
    """Return a notice for each cell that has stopped ranks.

    Args:
        stops: all current stops.
        setters: the cell that set each breakpoint, for stops whose cell is unknown.
    """
    by_cell: dict[str, list[RankStop]] = {}
    for at in live(stops):
        by_cell.setdefault(at.stop.cell or setters.get(at.stop.breakpoint, ""), []).append(at)
    return [StopNotice(cell, tuple(found)) for cell, found in by_cell.items()]


def notice_text(notice: StopNotice, hint: str, label: Label | None = None) -> str:
    """Format a notice for display in the cell.

    Args:
        notice: the notice.
        hint: a line below it; "" for none.
        label: labels files.
    """
    from monarch_kernel.debugger.commands.stop_text import stopped_text
    from monarch_kernel.debugger.events import grouped

    text = f"Stopped:\n{stopped_text(grouped(notice.stops), label)}"
    return f"{text}\n{hint}" if hint else text


class StopNotices:
    """Subscribes to the debugger of this kernel once it exists, and keeps the notice of each cell up to date.

    Args:
        notebook: the notebook of the cells.
        hint: returns the line to add to the notice of a cell, given its key; "" for none, None for no notice at all.
        is_complete: whether no further stops are expected.
    """

    def __init__(
        self,
        notebook: Notebook,
        hint: Callable[[str], str | None],
        is_complete: Callable[[list[RankStop]], bool],
    ) -> None:
        self._notebook = notebook
        self._hint = hint
        self._is_complete = is_complete
        #: Called on this object's thread once stops have been added or removed and then none has changed for a moment.
        self.on_settled: Callable[[MeshDebugger], None] = lambda _debugger: None
        #: The cell that set each breakpoint; it shows stops in threads that no cell has started.
        self.setters: dict[int, str] = {}
        self._shown: dict[CellOutput, str] = {}
        self._wake = threading.Condition()
        self._news = self._seen = 0
        self._known: set[tuple[str, int, int]] = set()
        self._closed = False
        self._debugger: MeshDebugger | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._on_made: Subscription | None = None
        self._thread: threading.Thread | None = None

    def install(self) -> None:
        """Begin. A debugger that already exists is included."""
        self._on_made = debuggers.on_made.subscribe(self._follow)
        hub = sys.modules.get("monarch_kernel.debugger.controller.hub")
        debugger = hub.existing_debugger() if hub is not None else None
        if debugger is not None:
            self._follow(debugger)

    def close(self) -> None:
        """Unsubscribe, and stop the thread."""
        if self._on_made is not None:
            self._on_made.close()
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._unsubscribe()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    @property
    def debugger(self) -> MeshDebugger | None:
        """The debugger; None if there is none."""
        return self._debugger

    def refresh(self) -> None:
        """Schedule an update: a cell has begun or ended, or a prompt was opened or closed."""
        if self._debugger is not None:
            with self._wake:
                self._news += 1
                self._wake.notify()

    def _follow(self, debugger: MeshDebugger) -> None:
        self._unsubscribe()
        self._debugger = debugger
        self._unsubscribe = debugger.subscribe(lambda _event: self.refresh())
        with self._wake:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="monarch-stops", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._has_news)
                end = time.monotonic() + LONGEST
                while not self._closed and self._more_to_come() and time.monotonic() < end:
                    self._seen = self._news
                    self._wake.wait_for(self._has_news, SETTLE)
                if self._closed:
                    return
                self._seen = self._news
            debugger = self._debugger
            if debugger is not None:
                try:
                    self.on_settled(debugger)
                    self._update(debugger)
                except Exception:
                    log.exception("stopped ranks could not be shown")

    def _more_to_come(self) -> bool:
        """Return whether ranks have just stopped, so that others may stop in a moment."""
        stops = live(self._debugger.stops()) if self._debugger is not None else []
        before, self._known = self._known, {at.key for at in stops}
        return self._has_news() and not self._known <= before and not self._is_complete(stops)

    def _has_news(self) -> bool:
        return self._news != self._seen or self._closed

    def _update(self, debugger: MeshDebugger) -> None:
        wanted: dict[CellOutput, str] = {}
        for notice in notices_of(debugger.stops(), self.setters):
            output = self._notebook.output_of(notice.cell)
            hint = self._hint(notice.cell)
            if output is not None and hint is not None:
                wanted[output] = notice_text(notice, hint, self._notebook.file_label)
        for output in {**self._shown, **wanted}:
            if output.notice(wanted.get(output, "")):
                self._notebook.router.touch(output)
        self._shown = wanted


def is_part_of(cell: str, key: str) -> bool:
    """Return whether a cell has this key, or is a part of that cell: keys of parts extend the key of the cell."""
    return cell == key or cell.startswith(f"{key}.")


def live(stops: Iterable[RankStop]) -> list[RankStop]:
    """Return the stops that hold a thread, without the post-mortem frames of errors."""
    return [at for at in stops if at.stop.thread]


def of_cell(stops: Iterable[RankStop], key: str) -> list[RankStop]:
    """Return the live stops in code that the cell with this key runs."""
    return [at for at in live(stops) if is_part_of(at.stop.cell, key)]


def terminal_hint() -> str:
    """Return a hint on how to reach stopped ranks while the kernel is busy."""
    return f"monarch-kernel debug {os.getpid()} in a terminal opens a prompt."
