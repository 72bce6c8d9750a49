"""Stopped ranks in a notebook: the cell that they run for says who is stopped where, as long as they are.

No other cell ever does. What nobody knows the cell of (a thread of the user's own, the cell of an earlier kernel) is
told by the cell that has set the breakpoint, and else by the next `%mesh debug`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from monarch_kernel import debugger as debuggers
from monarch_kernel.debugger.commands import frontend
from monarch_kernel.debugger.commands.frontend import Surroundings
from monarch_kernel.debugger.commands.grammar import CommandError
from monarch_kernel.kernel.output.cell_output import CellOutput
from monarch_kernel.meshes import get_mesh

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hub import MeshDebugger
    from monarch_kernel.debugger.events import RankStop
    from monarch_kernel.kernel.notebook import Notebook

log = logging.getLogger(__name__)

#: Stops that come within this time of one another are told together (seconds), unless no more can come.
SETTLE = 0.4
#: How long the first of them waits at most for others (seconds).
LONGEST = 2.0


class NotebookSurroundings(Surroundings):
    """What consoles, also those of other programs, know of this notebook."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook

    def label(self, file: str) -> str | None:
        """`Cell In[3]` for the file of a cell."""
        return self._notebook.file_label(file)

    def mesh(self) -> str | None:
        """The mesh in use."""
        return self._notebook.session.current or super().mesh()

    def cell(self, number: int) -> tuple[str, str]:
        """A cell by its execution number; 0: the last `%%mesh` cell."""
        if number == 0:
            if self._notebook.last_cell is None:
                raise CommandError("no %%mesh cell has run yet; give the number of a cell, as in 5:3")
            return self._notebook.last_cell
        return self._notebook.cell_source(number)

    def extent(self, mesh: str) -> Any:
        """The extent of a mesh."""
        try:
            return self._notebook.session.find(mesh, "debug").extent
        except UsageError:
            with suppress(LookupError):
                return get_mesh(mesh).extent
        return super().extent(mesh)


class StopNotices:
    """Follows the debugger of this kernel, once there is one, and keeps each cell's notice true.

    Args:
        notebook: whose cells.
        hint: what to add to the notice of a cell, given its key; "" for nothing, None to have no notice at all.
        is_complete: whether these stops are all that can be expected.
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
        #: Called on the thread of this object when stops have come or gone, and none has for a moment.
        self.on_settled: Callable[[MeshDebugger], None] = lambda _debugger: None
        #: The cell in which each breakpoint was set: it tells of stops in threads that no cell has started.
        self.setters: dict[int, str] = {}
        self._shown: dict[CellOutput, str] = {}
        self._wake = threading.Condition()
        self._news = self._seen = 0
        self._known: set[Any] = set()
        self._closed = False
        self._debugger: MeshDebugger | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None

    def install(self) -> None:
        """Begin; a debugger that is there already is followed, too."""
        frontend.use(NotebookSurroundings(self._notebook))
        debuggers.on_made.append(self._follow)
        hub = sys.modules.get("monarch_kernel.debugger.controller.hub")
        debugger = hub.existing_debugger() if hub is not None else None
        if debugger is not None:
            self._follow(debugger)

    def close(self) -> None:
        """Follow no more."""
        with suppress(ValueError):
            debuggers.on_made.remove(self._follow)
        frontend.use(None)
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._unsubscribe()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    @property
    def debugger(self) -> MeshDebugger | None:
        """The debugger, if there is one."""
        return self._debugger

    def refresh(self) -> None:
        """Look again soon: a cell has begun or ended, or a prompt was opened or closed."""
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
        """Whether ranks have just stopped, and others may do so in a moment."""
        stops = live(self._debugger.stops()) if self._debugger is not None else []
        before, self._known = self._known, {at.key for at in stops}
        return self._has_news() and not self._known <= before and not self._is_complete(stops)

    def _has_news(self) -> bool:
        return self._news != self._seen or self._closed

    def _update(self, debugger: MeshDebugger) -> None:
        from monarch_kernel.debugger.commands.stop_text import grouped, stopped_text

        by_cell: dict[str, list[RankStop]] = {}
        for at in live(debugger.stops()):
            by_cell.setdefault(at.stop.cell or self.setters.get(at.stop.breakpoint, ""), []).append(at)
        wanted: dict[CellOutput, str] = {}
        for cell, stops in by_cell.items():
            output = self._notebook.output_of(cell)
            hint = self._hint(cell)
            if output is not None and hint is not None:
                text = f"Stopped:\n{stopped_text(grouped(stops), self._notebook.file_label)}"
                wanted[output] = f"{text}\n{hint}" if hint else text
        for output in {**self._shown, **wanted}:
            if output.notice(wanted.get(output, "")):
                self._notebook.router.touch(output)
        self._shown = wanted


def live(stops: Iterable[RankStop]) -> list[RankStop]:
    """Those of threads that are held up, and not the kept frames of errors."""
    return [at for at in stops if at.stop.thread]


def of_cell(stops: Iterable[RankStop], key: str) -> list[RankStop]:
    """The live stops of what a cell of the notebook runs; `key` is what that cell's parts begin with."""
    return [at for at in live(stops) if at.stop.cell == key or at.stop.cell.startswith(f"{key}.")]


def terminal_hint() -> str:
    """How to get at stopped ranks while the kernel is busy."""
    return f"monarch-kernel debug {os.getpid()} in a terminal opens a prompt."
