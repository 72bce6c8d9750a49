"""Brings every rank's output to the cell that caused it, live, whatever runs meanwhile and after the cell's end.

`monarch_kernel.output.subscribe` calls `OutputRouter.on_event` on the thread that polls, which only files the event.
The router's own thread shows what has changed, a few times a second; the thread that runs a cell shows the rest when
the cell ends, so the last state is exact.
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
#: How long output waits for that of other ranks before it is shown (seconds).
GATHER = 0.03

_MOST_CELLS = 500


class OutputRouter:
    """Files the events of all ranks with their cells, and has them shown.

    Args:
        fallback: finds the output of the cell that runs (or ran last), for events that name no known cell, and the
            key under which to keep it; None where there is no such cell.
        describe: what a label's tooltip says of some ranks.
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
        """Have the events of `cell` filed with `output`."""
        output.tooltip = self._describe
        self._cells[cell] = output
        while len(self._cells) > _MOST_CELLS:
            self._cells.popitem(last=False)
        return output

    def on_event(self, event: RankOutput) -> None:
        """File one event of a rank. Quick; may be called on any thread."""
        source = Source(event.mesh, event.rank)
        if event.kind == "begin":
            self._places[source] = event.host, event.pid
        if event.kind == "flush":
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
        """The output that `cell` was opened with."""
        return self._cells.get(cell)

    def whereabouts(self, source: Source) -> tuple[str, int]:
        """Host and pid of a rank that has run a cell; empty and 0 if it has not."""
        return self._places.get(source, ("", 0))

    def touch(self, output: CellOutput) -> None:
        """Have `output` shown soon."""
        with self._changed:
            if self._closed:
                return
            self._dirty[output] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-cells", daemon=True)
                self._thread.start()
            self._changed.notify()

    def abandon(self, why: str) -> None:
        """The kernel ends: cells that still run say so, in place of how far they are."""
        for output in list(self._cells.values()):
            if output.abandon(why):
                output.show()

    def close(self) -> None:
        """Show what is left, and stop."""
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
                except Exception:  # the front end's socket may be closed; other cells go on
                    import logging

                    logging.getLogger(__name__).exception("the output of a cell could not be shown")
            with self._changed:
                self._dirty.update(dict.fromkeys(again))
                self._changed.wait_for(lambda: self._closed, PERIOD)
