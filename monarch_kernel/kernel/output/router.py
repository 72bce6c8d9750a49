"""Route every rank's output live to the cell that caused it, even if another cell runs or the cell has ended.

`monarch_kernel.output.subscribe` calls `OutputRouter.on_event` on the polling thread; it only records the event. The
router's own thread shows changes a few times a second. When a cell ends, its own thread shows the rest, so the final
state is exact.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from monarch_kernel.kernel.output.cell_output import CellOutput
from monarch_kernel.kernel.output.render import Tooltip
from monarch_kernel.kernel.output.transcript import Source
from monarch_kernel.output import RankOutput

#: The shortest time between two updates of what a cell shows (seconds).
PERIOD = 0.12
#: The time that output waits for output of other ranks before it is shown (seconds).
GATHER = 0.03

_MOST_CELLS = 500


class OutputRouter:
    """Records the events of all ranks with their cells, and schedules updates of the cells.

    Args:
        fallback: for events that name no known cell, returns a key and the output of the running (or last) cell; None
            if there is no such cell.
        describe: returns the text of a label's tooltip for some ranks.
    """

    def __init__(
        self, fallback: Callable[[str], tuple[str, CellOutput] | None], describe: Tooltip | None = None
    ) -> None:
        self._fallback = fallback
        self._describe = describe
        self._cells: OrderedDict[str, CellOutput] = OrderedDict()
        self._places: dict[Source, tuple[str, int]] = {}
        self._dirty: dict[CellOutput, None] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def open(self, cell: str, output: CellOutput) -> CellOutput:
        """Record the events of `cell` with `output`."""
        output.tooltip = self._describe
        self._cells[cell] = output
        while len(self._cells) > _MOST_CELLS:
            self._cells.popitem(last=False)
        return output

    def on_event(self, event: RankOutput) -> None:
        """Record one event of a rank. Fast; may be called on any thread."""
        source = Source(event.mesh, event.rank)
        if event.kind == "begin":
            self._places[source] = event.host, event.pid
        if event.kind in ("flush", "comm"):
            return
        output = self._cells.get(event.cell)
        if output is None:
            if event.kind in ("begin", "end"):
                return
            found = self._fallback(event.cell)
            if found is None:
                return
            key, output = found
            if self._cells.get(key) is not output:
                self.open(key, output)
        if output.feed(source, event.kind, event.stream, event.data):
            self.touch(output)

    def get(self, cell: str) -> CellOutput | None:
        """Return the output that `cell` was opened with; None if it is unknown."""
        return self._cells.get(cell)

    def whereabouts(self, source: Source) -> tuple[str, int]:
        """Return host and pid of a rank that has run a cell; "" and 0 for other ranks."""
        return self._places.get(source, ("", 0))

    def touch(self, output: CellOutput) -> None:
        """Schedule an update of `output`."""
        with self._changed:
            if self._closed:
                return
            self._dirty[output] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-cells", daemon=True)
                self._thread.start()
            self._changed.notify()

    def abandon(self, why: str) -> None:
        """Replace the progress of cells that still run with `why`, as the kernel ends."""
        for output in list(self._cells.values()):
            if output.abandon(why):
                output.show()

    def close(self) -> None:
        """Show the remaining output, and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(2)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._dirty or self._closed)
                if self._closed and not self._dirty:
                    return
                self._changed.wait_for(lambda: self._closed, GATHER)
                outputs, self._dirty = list(self._dirty), {}
            again: list[CellOutput] = []
            for output in outputs:
                try:
                    if output.show(final=self._closed) and not self._closed:
                        again.append(output)
                except Exception:  # the front end's socket may be closed; continue with other cells
                    import logging

                    logging.getLogger(__name__).exception("the output of a cell could not be shown")
            with self._changed:
                self._dirty.update(dict.fromkeys(again))
                self._changed.wait_for(lambda: self._closed, PERIOD)
