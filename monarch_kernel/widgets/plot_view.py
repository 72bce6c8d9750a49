"""`mesh.plot("loss")`: plot an expression of ranks as lines that grow while a cell runs, and stay as a chart."""

from __future__ import annotations

import math
import statistics
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING, Any

from monarch_kernel.actor import ActorMesh, ProcMesh
from monarch_kernel.display import runs_hidden, tables
from monarch_kernel.display.charts import figure, over_time
from monarch_kernel.meshes import format_ranks, name_ranks
from monarch_kernel.subscriptions import Subscribers
from monarch_kernel.widgets.open_views import live_view, shell, view_bundle
from monarch_kernel.widgets.plotting import PlotHistory, Points, Sampler, chosen, key_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult


#: The interval at which a chart is redrawn in a front end without live views (seconds).
REDRAWN = 1.0
#: The maximum number of earlier readings for a view that is opened later.
_MOST_EARLIER = 200
_NAMED = 4


class Plot:
    """A plot of an expression of ranks over time.

    In a notebook, it is shown in the cell that creates it. It ends with the first cell in which its numbers have
    changed: that cell, or the next one. In a program it continues until `stop`.

    Attributes:
        expression: the expression.
        mesh: the name of the mesh; ranks are numbered as in this mesh as spawned.
        ranks: the ranks that are read.
    """

    def __init__(
        self, mesh: ProcMesh | ActorMesh[Any], expression: str, ranks: Iterable[int] | None, period: float
    ) -> None:
        procs, self.ranks = chosen(mesh, ranks)
        self.expression = expression.strip()
        self.mesh = str(procs.name)
        self._key = key_of(procs)
        self._period = period
        self._history = PlotHistory()
        self._readings: Subscribers[[Points]] = Subscribers("a view of a plot")
        self._error = ""
        self._ended = False
        self._running = True
        self._lock = threading.Lock()
        self._drawn = 0.0
        self._display = ""  # its display_id, once a cell shows it
        self._shown_by: object = None
        self._live: Any = None
        self._shell = shell()
        self._sampler = Sampler(
            procs, expression, self.ranks, period, self._on_points, self._on_error, lambda: self._running
        )
        _open.add(self)
        if self._shell is not None:
            self._shell.events.register("pre_run_cell", self._before_cell)
            self._shell.events.register("post_run_cell", self._after_cell)

    # -- for programs ------------------------------------------------------------------------------

    def data(self) -> dict[int, list[tuple[float, float]]]:
        """Return times (seconds since 1970) and numbers for each rank; in a long run, older ones are sparse."""
        return self._history.data()

    def outliers(self) -> list[int]:
        """Return the ranks whose last numbers are outliers."""
        return self._history.outliers()

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._ended

    def stop(self) -> None:
        """End the plot. The chart stays. Stopping again does nothing."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._sampler.close()
        _open.discard(self)
        if self._shell is not None:
            for name, callback in (("pre_run_cell", self._before_cell), ("post_run_cell", self._after_cell)):
                with suppress(ValueError):
                    self._shell.events.unregister(name, callback)
        self._readings.notify((time.time(), {}))
        self._redraw()

    # -- readings ----------------------------------------------------------------------------------

    def _on_points(self, reading: Points) -> None:
        """Handle a reading, on the sampler's thread."""
        self._history.add(reading)
        if len(reading[1]) == len(self.ranks):
            self._error = ""
        self._readings.notify(reading)
        now = time.monotonic()
        if self._live is None and now - self._drawn >= REDRAWN:
            self._drawn = now
            self._redraw()

    def _on_error(self, text: str) -> None:
        self._error = text
        self._readings.notify((time.time(), {}))

    def _before_cell(self, _info: object) -> None:
        self._running = not runs_hidden(self._shell)

    def _after_cell(self, _result: ExecutionResult) -> None:
        """Handle the end of a cell: draw its changes. The last numbers are the final ones of the cell."""
        if runs_hidden(self._shell):
            return
        if not self._ended:
            with suppress(Exception):  # the mesh was stopped
                self._sampler.read()
        self._running = False
        if self._history.has_changed:
            self.stop()

    # -- views -------------------------------------------------------------------------------------

    def show(self) -> None:
        """Show the plot in the running cell. Does nothing in a program."""
        if self._shell is None:
            return
        self._shown_by = self._shell.execution_count
        self._display = self._display or uuid.uuid4().hex
        if not self._ended:
            self._live = live_view(
                self._stream, view="plot", mesh=self._key, expression=self.expression, period=self._period
            )
        self._publish(update=False)

    def _ipython_display_(self) -> None:
        if self._shell is None or self._shown_by != self._shell.execution_count:
            self.show()

    def _redraw(self) -> None:
        if self._display:
            self._publish(update=True)

    def _publish(self, *, update: bool) -> None:
        bundle: dict[str, object] = {"text/plain": repr(self), "text/html": self._repr_html_()}
        if self._live is not None:
            bundle |= view_bundle(self._live)
        transient = {"display_id": self._display}
        if self._shell is not None:
            self._shell.display_pub.publish(data=bundle, metadata={}, transient=transient, update=update)

    def __repr__(self) -> str:
        return "\n".join([self._caption(), *([self._error] if self._error else [])])

    def _repr_html_(self) -> str:
        chart = over_time(self.data(), self.outliers())
        error = f'<div style="{tables.BAD}">{escape(self._error)}</div>' if self._error else ""
        caption = f'<div style="margin-bottom:3px">{escape(self._caption())}</div>'
        return f'<div style="{tables.VIEW}">{caption}{chart}{error}</div>'

    def _caption(self) -> str:
        last = self._history.last()
        finite = [number for number in last.values() if math.isfinite(number)]
        told = f"{self.expression} on {len(self.ranks)} rank{'s' * (len(self.ranks) != 1)} of mesh {self.mesh}"
        if not last:
            return f"{told}: no numbers yet"
        if len(last) == 1:
            return f"{told}: {figure(next(iter(last.values())))}"
        if finite:
            low, high = figure(min(finite)), figure(max(finite))
            told += f": {low}" if low == high else f": median {figure(statistics.median(finite))}, {low} to {high}"
        out = self.outliers()
        if out:
            named = ", ".join(f"{rank} ({figure(last[rank])})" for rank in out[:_NAMED])
            more = f" and {format_ranks(out[_NAMED:], limit=3)}" if len(out) > _NAMED else ""
            told += f"; {'rank' if len(out) == 1 else 'ranks'} {named}{more} stand{'s' * (len(out) == 1)} out"
        broken = [rank for rank, number in last.items() if not math.isfinite(number) and rank not in out]
        if broken:
            told += f"; {name_ranks(broken, limit=6)} {'has' if len(broken) == 1 else 'have'} no finite number"
        gaps = [rank for rank in self._history.gaps() if math.isfinite(last[rank])]
        if gaps:
            told += f"; {name_ranks(gaps, limit=6)} had no finite number at times"
        return told

    def _stream(self, _request: Mapping[str, object], push: Callable[[dict[str, object]], object]) -> _PlotStream:
        return _PlotStream(self, push)


class _PlotStream:
    """The points of a plot for one view: the existing ones, then new ones."""

    def __init__(self, plot: Plot, push: Callable[[dict[str, object]], object]) -> None:
        self._plot = plot
        self._push = push
        self._told = ""
        earlier: dict[float, list[list[object]]] = {}
        for rank, points in plot.data().items():
            for when, number in points:
                earlier.setdefault(when, []).append([rank, _json(number)])
        times = sorted(earlier)
        for when in times[:: max(1, len(times) // _MOST_EARLIER)]:
            push({"time": when, "values": earlier[when]})
        self._subscription = plot._readings.subscribe(self._on_reading)
        if plot.ended:
            self._on_reading((time.time(), {}))

    def _on_reading(self, reading: Points) -> None:
        when, numbers = reading
        message: dict[str, object] = {
            "time": when,
            "values": [[rank, _json(number)] for rank, number in numbers.items()],
        }
        if self._plot._error != self._told:
            self._told = message["error"] = self._plot._error
        if self._plot.ended:
            message["ended"] = True
        self._push(message)

    def close(self) -> None:
        """Stop pushing points."""
        self._subscription.close()


def stop_plots() -> int:
    """Stop all plots. Return how many there were."""
    found = [each for each in _open if not each.ended]
    for each in found:
        each.stop()
    return len(found)


_open: weakref.WeakSet[Plot] = weakref.WeakSet()


def _json(number: float) -> float | None:
    return number if math.isfinite(number) else None
