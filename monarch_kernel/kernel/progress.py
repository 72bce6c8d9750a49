"""The progress of a long cell, as data and as one line: which ranks are done, and where the others are. Pure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from monarch_kernel.meshes import format_ranks

if TYPE_CHECKING:
    from monarch_kernel.kernel.notebook import Notebook


#: The delay before a cell shows progress (seconds).
QUIET = 1.0
#: The interval between queries for the locations of ranks (seconds).
PERIOD = 1.0

_MOST_LOCATIONS = 3

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class CodeLocation:
    """Where a rank's main thread is, in the user's own code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return where if self.function in ("", "<module>") else f"{where} in {self.function}"


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """The progress of a cell. Ranks are sorted.

    Attributes:
        total: the number of ranks it runs on.
        done: the number of ranks that have finished.
        waiting: the ranks that are running it.
        locations: the ranks at each known location.
        failed: the failed ranks, by the exception in one line.
        queued: the ranks that have not begun, by what they still run.
        silent: the ranks that are alive but do not respond, by the reason.
    """

    total: int
    done: int
    waiting: tuple[int, ...]
    locations: Mapping[CodeLocation, Sequence[int]]
    failed: Mapping[str, Sequence[int]]
    queued: Mapping[str, Sequence[int]]
    silent: Mapping[str, Sequence[int]]


class Progress:
    """Which ranks of a cell are done, failed or still running, and when to show that.

    Args:
        ranks: the ranks that the cell runs on.
        now: the time of its start, on the same clock as the later `now` arguments.
    """

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self.total = 0
        self.waiting: set[int] = set()
        #: Ranks that are alive but do not respond, and why.
        self.silent: dict[int, str] = {}
        self.failed: dict[int, str] = {}
        #: Ranks that still run something else, and what.
        self.queued: dict[int, str] = {}
        self._locations: dict[int, CodeLocation] = {}
        self._started = now
        self._asked = now
        for rank in ranks:
            self.waiting.add(rank)
            self.total += 1

    def done(self, rank: int) -> None:
        """Record that `rank` has finished."""
        self.waiting.discard(rank)
        self.queued.pop(rank, None)
        self._locations.pop(rank, None)

    def fail(self, rank: int, why: str) -> None:
        """Record that `rank` has failed; `why` is the exception in one line."""
        self.done(rank)
        self.failed[rank] = why

    def at(self, locations: Mapping[int, CodeLocation | None]) -> None:
        """Record the recent locations of ranks; None if a location is unknown."""
        for rank, location in locations.items():
            if location is None:
                self._locations.pop(rank, None)
            elif rank in self.waiting:
                self.queued.pop(rank, None)
                self._locations[rank] = location

    def behind(self, rank: int, what: str) -> None:
        """Record that `rank` has not begun, since it still runs `what`."""
        if rank in self.waiting:
            self.queued[rank] = what

    def standing(self) -> object:
        """Return a value that changes when the cell makes progress."""
        return frozenset(self.waiting), frozenset(self.failed), frozenset(self._locations.items())

    def is_due(self, now: float) -> bool:
        """Return whether to query the ranks for their locations now."""
        if now - self._started < QUIET or now - self._asked < PERIOD or not self.waiting:
            return False
        self._asked = now
        return True

    def report(self, now: float) -> ProgressReport | None:
        """Return the progress so far; None while there is nothing to show."""
        if now - self._started < QUIET or not self.waiting:
            return None
        return ProgressReport(
            self.total,
            self.total - len(self.waiting) - len(self.failed),
            tuple(sorted(self.waiting - self.queued.keys())),
            _by_value(dict(sorted(self._locations.items()))),
            _by_value(self.failed),
            _by_value(self.queued),
            _by_value({rank: why for rank, why in self.silent.items() if rank in self.waiting}),
        )

    def line(self, now: float) -> str:
        """Return the line to show; empty while there is nothing to show."""
        report = self.report(now)
        return "" if report is None else progress_text(report)


def progress_text(report: ProgressReport) -> str:
    """Format a report as one line."""
    parts = [f"{report.done} of {report.total} ranks done"] if report.total > 1 else []
    parts += [f"{format_ranks(ranks, limit=6)} failed: {why}" for why, ranks in report.failed.items()]
    for what, ranks in report.queued.items():
        ranks_text = "" if len(ranks) == report.total else f"{_listed(ranks)} "
        parts.append(f"{ranks_text}queued behind {what}")
    if report.waiting:
        parts.append(_waiting_text(report))
    parts += [f"{_listed(ranks)} does not respond: {why}" for why, ranks in report.silent.items()]
    return " · ".join(parts)


def _waiting_text(report: ProgressReport) -> str:
    waiting, locations = report.waiting, report.locations
    if not locations:
        return f"waiting for {_listed(waiting)}"
    if len(locations) == 1 and sum(map(len, locations.values())) == len(waiting):
        return f"waiting for {_listed(waiting)} · {next(iter(locations))}"
    shown = list(locations.items())[:_MOST_LOCATIONS]
    said = [f"{_listed(ranks)} at {location}" for location, ranks in shown]
    rest = set(waiting).difference(*(ranks for _, ranks in shown))
    if rest:
        said.append(f"{_listed(rest)} elsewhere" if said else _listed(rest))
    return f"waiting for {', '.join(said)}"


def _by_value(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    found: dict[Value, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def _listed(ranks: Iterable[int]) -> str:
    return format_ranks(ranks, limit=6).replace(",", ", ")


# A temporary status line in the running cell.


@contextmanager
def shown_line(notebook: Notebook, line: str, wanted: bool = True) -> Generator[Callable[[str], None]]:
    """Show a status line in the running cell after a short delay, and remove it at the end of the block.

    Args:
        notebook: the notebook in which the cell runs.
        line: the initial text.
        wanted: whether to show anything.

    Returns:
        A function that replaces the line, on any thread.
    """
    output = notebook.progress_output() if wanted else None
    lock = threading.Lock()
    due, ended = False, False

    def update() -> None:
        if output is not None and due and not ended and output.progress(line):
            notebook.router.touch(output)

    def begin() -> None:
        nonlocal due
        with lock:
            due = True
            update()

    def tell(text: str) -> None:
        nonlocal line
        with lock:
            line = text
            update()

    timer = threading.Timer(QUIET, begin)  # shows the line even if no update arrives, as when a host does not answer
    timer.daemon = True
    timer.start()
    try:
        yield tell
    finally:
        timer.cancel()
        with lock:
            ended = True
        if output is not None and output.progress(""):
            output.show()
