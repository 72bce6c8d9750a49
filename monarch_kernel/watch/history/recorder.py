"""Record a history: convert the changes of a watch to rows."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import msgspec

from monarch_kernel.meshes import format_ranks
from monarch_kernel.watch.history.query import TABLES, BoundedTables, ColumnTable, QueryResult, ask, named_tables
from monarch_kernel.watch.model import ActorView, Delta, HostView, MeshView, RankView
from monarch_kernel.watch.watcher import Watch

#: The default size limit of a history (bytes). New rows replace the oldest of the largest table.
LIMIT = 32 << 20
#: The sampling interval (seconds).
PERIOD = 1.0

#: Sampled fields of a ``RankView``, with their columns.
_SAMPLED = {
    "rss": "memory",
    **{field: field for field in ("cpu", "waiting", "calls", "failures", "sent", "received")},
}


class History:
    """The history of this controller's meshes, recorded between ``start`` and ``stop``. Thread-safe.

    Rows are kept after ``stop``, until ``clear``. While recording is off, the only cost is their memory.

    Args:
        limit: the maximum size of the rows (bytes).
        period: the minimum interval between two samples (seconds).
    """

    def __init__(self, limit: int = LIMIT, period: float = PERIOD) -> None:
        self._lock = threading.Lock()
        self._rows = BoundedTables(TABLES, limit)
        self._period = period
        self._watch: Watch | None = None
        self._states: dict[tuple[str, int], tuple[str, str]] = {}
        self._actors: dict[str, str] = {}  # what each actor runs, by its identifier

    @property
    def is_on(self) -> bool:
        """Whether it is recording."""
        return self._watch is not None

    @property
    def nbytes(self) -> int:
        """The size of all rows (bytes)."""
        with self._lock:
            return self._rows.nbytes

    @property
    def dropped(self) -> int:
        """The number of rows replaced by newer ones."""
        return self._rows.dropped

    def start(self) -> None:
        """Start recording. No effect if it is already recording."""
        with self._lock:
            if self._watch is not None:
                return
            watch = self._watch = Watch(self._period)
        watch.subscribe(self.note, since=0)

    def stop(self) -> None:
        """Stop recording. No effect if it is not recording."""
        with self._lock:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
            self._states.clear()
            self._actors.clear()

    def clear(self) -> None:
        """Remove all rows. While it is recording, the current state is kept."""
        with self._lock:
            self._rows = BoundedTables(TABLES, self._rows.limit)
            self._states.clear()
            self._actors.clear()
            watch = self._watch
        if watch is not None:
            self.note(msgspec.structs.replace(watch.since(0), failures=()))

    def query(self, sql: str) -> QueryResult:
        """Run an SQL query; docs/telemetry.md lists the tables.

        Raises:
            HistoryQueryError: the query is invalid.
        """
        return ask(self.tables(named_tables(sql)), sql)

    def tables(self, names: Iterable[str] = TABLES) -> dict[str, ColumnTable]:
        """Return copies of some or all of its tables."""
        with self._lock:
            return {name: self._rows.tables[name].copy() for name in names}

    def series(
        self, mesh: str, field: str, ranks: tuple[int, ...] | None = None
    ) -> dict[int, list[tuple[float, float]]]:
        """Return the samples of a field of ranks, such as ``rss``, as (time, value), for a chart.

        Args:
            mesh: the key of the mesh.
            field: of ``RankView``: rss, cpu, waiting, calls, failures, sent or received.
            ranks: the ranks; None: all.

        Raises:
            ValueError: the field is not sampled.
        """
        if field not in _SAMPLED:
            raise ValueError(f"{field!r} is not sampled; there are {', '.join(_SAMPLED)}")
        found: dict[int, list[tuple[float, float]]] = {}
        with self._lock:
            columns = self._rows.tables["rank_samples"].columns
            named = ("timestamp_us", "mesh_id", "rank", _SAMPLED[field])
            rows = list(zip(*(columns[name].values() for name in named), strict=True))
        for at, key, rank, value in rows:
            if key == mesh and (ranks is None or rank in ranks):
                found.setdefault(rank, []).append((at / 1e6, value))
        return found

    # -- rows -------------------------------------------------------------------------------------

    def note(self, delta: Delta) -> None:
        """Add rows for changes."""
        at = round(delta.time * 1e6)
        with self._lock:
            for key, mesh in delta.meshes.items():
                self._mesh(at, key, mesh)
            for key in delta.gone_meshes:
                self._rows.append("meshes", key, at, "", "", 0, "gone")
                for place in [place for place in self._states if place[0] == key]:
                    del self._states[place]
            for host in delta.hosts.values():
                self._host(at, host)
            for (key, rank), view in delta.ranks.items():
                self._rank(at, key, rank, view, delta.fields.get((key, rank)))
            for failure in delta.failures:
                time = round(failure.time * 1e6)
                ranks = format_ranks(failure.ranks)
                self._rows.append("actor_failures", time, failure.mesh, ranks, failure.kind, failure.text)

    def _mesh(self, at: int, key: str, mesh: MeshView) -> None:
        shape = ", ".join(f"{label}={size}" for label, size in zip(mesh.labels, mesh.sizes, strict=True))
        ranks = 1
        for size in mesh.sizes:
            ranks *= size
        self._rows.append("meshes", key, at, mesh.name, shape, ranks, "seen")

    def _host(self, at: int, host: HostView) -> None:
        if host.memory_total:
            row: tuple[object, ...] = (at, host.name, float(host.cpu), host.memory_used, host.memory_total)
            self._rows.append("host_samples", *row)

    def _rank(self, at: int, key: str, rank: int, view: RankView, fields: frozenset[str] | None) -> None:
        state = (view.state.value, view.cause)
        if self._states.get((key, rank)) != state:
            self._states[key, rank] = state
            self._rows.append("rank_status_events", at, key, rank, *state)
        if not fields or fields & _SAMPLED.keys():
            sample = (view.rss, float(view.cpu), view.waiting, view.calls, view.failures, view.sent, view.received)
            self._rows.append("rank_samples", at, key, rank, *sample)
        if not fields or "actors" in fields:
            for actor in view.actors:
                self._actor(at, key, rank, view, actor)

    def _actor(self, at: int, key: str, rank: int, view: RankView, actor: ActorView) -> None:
        identifier = f"{view.proc or f'{key}.{rank}'}/{actor.name}"
        before = self._actors.get(identifier)
        if before is None:
            self._rows.append("actors", identifier, at, key, rank, actor.name, actor.cls)
        if before != actor.endpoint:
            self._actors[identifier] = actor.endpoint
            status = "processing" if actor.endpoint else "idle"
            self._rows.append("actor_status_events", at, identifier, key, rank, status, actor.endpoint)


_history: History | None = None


def history() -> History:
    """Return the history of this controller. It records only after it is started."""
    global _history
    if _history is None:
        _history = History()
    return _history
