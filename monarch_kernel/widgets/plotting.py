"""Sample an expression of ranks as a number over time, for `mesh.plot("loss")` and plots of front ends.

The ranks' debug agents evaluate it on separate threads, so it is also read while a cell runs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from monarch_kernel.actor import ActorMesh, ProcMesh
from monarch_kernel.debugger.controller.query import ask
from monarch_kernel.debugger.rank.values.probe import sample
from monarch_kernel.display.quantities import outliers
from monarch_kernel.introspection import whole_of
from monarch_kernel.meshes import format_ranks, list_proc_meshes

# Find meshes by the keys of their views, which front ends use.


def key_of(mesh: ProcMesh) -> str:
    """Return the key of a mesh's `MeshView`; for a slice, that of the mesh as spawned."""
    return whole_of(mesh).uid


def mesh_of(key: str) -> ProcMesh:
    """Return the mesh with that key.

    Raises:
        LookupError: the mesh was stopped.
    """
    for mesh in list_proc_meshes():
        if key_of(mesh) == key:
            return mesh
    raise LookupError("this mesh was stopped, or belongs to another kernel now")


log = logging.getLogger(__name__)

#: The minimum time between readings (seconds).
SHORTEST_PERIOD = 0.2
#: The time limit for ranks to evaluate it (seconds). A rank that takes longer has no number at that time.
TIMEOUT = 2.0
#: Reading takes at most this share of a core, so the period grows with the number of ranks.
_SHARE = 0.1
#: The maximum number of points of each rank. Beyond that, every second one of the older half is dropped.
MOST_POINTS = 2_000

Points = tuple[float, dict[int, float]]
"""A time (seconds since 1970), and the numbers of the ranks that had one."""


class Sampler:
    """Reads an expression on ranks repeatedly, on a separate thread, until it is closed.

    Args:
        mesh: the procs.
        expression: an expression in the ranks' namespace, or in that of their actors.
        ranks: the ranks, as numbered in the mesh as spawned.
        period: the minimum time between two readings (seconds), at least 0.2.
        on_points: called with each reading that has numbers.
        on_error: called once with each different sentence about ranks without numbers.
        is_due: returns whether to read; nothing is read while it is false.

    Raises:
        ValueError: it is not an expression, or the period is invalid.
    """

    def __init__(
        self,
        mesh: ProcMesh,
        expression: str,
        ranks: Sequence[int],
        period: float,
        on_points: Callable[[Points], object],
        on_error: Callable[[str], object],
        is_due: Callable[[], bool] = lambda: True,
    ) -> None:
        try:
            compile(expression.strip(), "<plot>", "eval")
        except SyntaxError as error:
            raise ValueError(f"{expression!r} is no expression ({error.msg}); give one, such as loss") from None
        if not 0 < period < math.inf:
            raise ValueError(f"the period is a number of seconds above 0, not {period!r}")
        self._mesh = mesh
        self._expression = expression.strip()
        self._ranks = tuple(ranks)
        self._period = max(period, SHORTEST_PERIOD)
        self._on_points = on_points
        self._on_error = on_error
        self._is_due = is_due
        self._told: set[str] = set()
        self._end = threading.Event()
        self._reading = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="monarch-plot", daemon=True)
        self._thread.start()

    @classmethod
    def of_request(cls, request: Mapping[str, Any], push: Callable[[dict[str, object]], object]) -> Sampler:
        """Create the sampler for a `plot` message of a front end. Its `points` (without `kind` and `id`) are pushed."""
        mesh = mesh_of(str(request.get("mesh")))
        ranks = [int(rank) for rank in request.get("ranks") or range(len(mesh))]

        def points(reading: Points) -> None:
            when, numbers = reading
            values = [[rank, number if math.isfinite(number) else None] for rank, number in numbers.items()]
            push({"time": when, "values": values})

        def error(text: str) -> None:
            push({"time": time.time(), "values": [], "error": text})

        period = request.get("period")
        return cls(
            mesh,
            str(request.get("expression") or ""),
            ranks,
            float(period) if isinstance(period, int | float) and period > 0 else SHORTEST_PERIOD,
            points,
            error,
        )

    def close(self) -> None:
        """Stop reading. Closing again does nothing."""
        self._end.set()

    def read(self) -> None:
        """Read once, now, on the calling thread, after any reading in progress."""
        with self._reading:
            when = time.time()
            try:
                answers = ask(self._mesh, sample, self._expression, ranks=self._ranks, timeout=TIMEOUT)
            except (RuntimeError, ValueError) as error:  # the mesh was stopped
                self._say(str(error))
                self._end.set()
                return
            reasons: dict[str, list[int]] = {}
            for rank in answers.errors:
                reasons.setdefault(answers.error_of(rank), []).append(rank)
            for why, ranks in reasons.items():
                self._say(f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(sorted(ranks), limit=6)}: {why}")
            if answers.values:
                self._on_points((when, dict(sorted(answers.values.items()))))

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._on_error(text)

    def _run(self) -> None:
        pause = 0.0
        while not self._end.wait(pause):
            pause = self._period
            if not self._is_due():
                continue
            started, spent = time.perf_counter(), time.thread_time()
            try:
                self.read()
            except Exception:
                log.exception("%s could not be read", self._expression)
                return
            spent = time.thread_time() - spent
            pause = max(0.0, self._period - (time.perf_counter() - started), spent * (1 / _SHARE - 1))


class PlotHistory:
    """The numbers of a plot, bounded: in a long run, older ones become sparse. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readings: deque[Points] = deque()

    def add(self, reading: Points) -> None:
        """Add a reading."""
        with self._lock:
            self._readings.append(reading)
            if len(self._readings) > MOST_POINTS:
                every = list(self._readings)
                half = len(every) // 2
                self._readings = deque([*every[:half:2], *every[half:]])

    def data(self) -> dict[int, list[tuple[float, float]]]:
        """Return times (seconds since 1970) and numbers for each rank, ordered by time."""
        with self._lock:
            readings = list(self._readings)
        found: dict[int, list[tuple[float, float]]] = {}
        for when, numbers in readings:
            for rank, number in numbers.items():
                found.setdefault(rank, []).append((when, number))
        return dict(sorted(found.items()))

    def last(self) -> dict[int, float]:
        """Return the last number of each rank."""
        return {rank: points[-1][1] for rank, points in self.data().items()}

    def gaps(self) -> list[int]:
        """Return the ranks that have had a number that was not finite."""
        return [rank for rank, points in self.data().items() if not all(math.isfinite(number) for _, number in points)]

    def outliers(self) -> list[int]:
        """Return the ranks whose last numbers are outliers."""
        return outliers(self.last())

    @property
    def has_changed(self) -> bool:
        """Return whether a rank has had two different numbers. NaN counts as one number."""
        first: dict[int, float] = {}
        with self._lock:
            for _, numbers in self._readings:
                for rank, number in numbers.items():
                    was = first.setdefault(rank, number)
                    if was != number and not (math.isnan(was) and math.isnan(number)):
                        return True
        return False


def chosen(mesh: ProcMesh | ActorMesh[object], ranks: Iterable[int] | None) -> tuple[ProcMesh, list[int]]:
    """Return the mesh as spawned, and in it the ranks that are plotted.

    Args:
        mesh: a mesh of procs or actors, or a slice of one.
        ranks: the ranks of ``mesh``; None for all.

    Raises:
        ValueError: the mesh has no such rank.
    """
    whole = whole_of(mesh)
    if ranks is None:
        return whole.procs, sorted(whole.ranks)
    wanted = sorted(set(ranks))
    for rank in wanted:
        if not 0 <= rank < len(whole.ranks):
            raise ValueError(f"there is no rank {rank}: the mesh has {len(whole.ranks)} (0 to {len(whole.ranks) - 1})")
    return whole.procs, sorted(whole.ranks[rank] for rank in wanted)
