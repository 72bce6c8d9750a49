"""The board: takes facts, and returns a snapshot or the changes since a version. No clock, threads or sockets."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from monarch_kernel.watch.model import (
    STATE_ORDER,
    ActorView,
    Delta,
    FailureView,
    HostView,
    JobView,
    MeshView,
    RankState,
    RankView,
    Snapshot,
    StopView,
)

# Facts that sources report to a board. Each has the key of an object and the known fields of its view.


class MeshFact(msgspec.Struct, frozen=True):
    """A mesh with its ranks. The mesh is new, or dead ranks were replaced.

    Attributes:
        procs, hosts: for each rank, the identifier of its process and the key of its host.
        host_names: names of these hosts, by their keys.
    """

    key: str
    name: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    procs: tuple[str, ...]
    hosts: tuple[str, ...]
    host_names: dict[str, str]
    kept: str = ""


class MeshGone(msgspec.Struct, frozen=True):
    """A mesh was stopped, or now belongs to another controller."""

    key: str


class MeshMark(msgspec.Struct, frozen=True):
    """Fields of a ``MeshView``: ``current``, ``kept`` or ``hang``. Unknown meshes are ignored."""

    key: str
    fields: dict[str, object]


class CurrentMesh(msgspec.Struct, frozen=True):
    """The mesh on which ``%%mesh`` cells run; an empty key if there is none."""

    key: str


class HostFact(msgspec.Struct, frozen=True):
    """Fields of a ``HostView``. Unknown hosts are ignored."""

    key: str
    fields: dict[str, Any]


class ProcFact(msgspec.Struct, frozen=True):
    """Fields of the ``RankView`` of a process, except derived fields such as ``state`` and ``doing``.

    Unknown and dead processes are ignored.
    """

    proc: str
    fields: dict[str, Any]


class ActorsFact(msgspec.Struct, frozen=True):
    """New, changed and ended actors of a process, by the unique names of their meshes."""

    proc: str
    actors: dict[str, ActorView]
    gone: tuple[str, ...] = ()


class StopFact(msgspec.Struct, frozen=True):
    """Where a rank is stopped in the debugger; None: it is no longer stopped.

    Attributes:
        mesh, rank: the ``key`` of the mesh, and the rank.
        since: when it stopped.
    """

    mesh: str
    rank: int
    stop: StopView | None
    since: float = 0.0


class CellFact(msgspec.Struct, frozen=True):
    """The notebook cell that runs directly on a process; ``cell`` is empty if there is none."""

    proc: str
    cell: str
    since: float


class CellName(msgspec.Struct, frozen=True):
    """The display name of a cell, such as ``cell [7]``.

    Attributes:
        cell: its id or the prefix of the id up to a dot, or the file that its code is compiled under.
    """

    cell: str
    name: str


class Condition(msgspec.Struct, frozen=True):
    """A condition of a process begins or ends. Several may hold; the worst determines the state.

    Attributes:
        state: ``STARTING``, ``DEAD``, ``ENDED``, ``UNRESPONSIVE`` or ``HEALING``.
        holds: whether it begins.
        since: when it began.
        cause: the reason.
    """

    proc: str
    state: RankState
    holds: bool
    since: float = 0.0
    cause: str = ""


class FailureFact(msgspec.Struct, frozen=True):
    """A failure; ``kind`` as in ``FailureView``.

    Attributes:
        procs: the affected processes; if empty, all ranks of ``mesh``.
        time: when it happened (seconds since 1970); 0: now.
    """

    kind: str
    text: str
    procs: tuple[str, ...] = ()
    mesh: str = ""
    time: float = 0.0


class JobsFact(msgspec.Struct, frozen=True):
    """All jobs whose hosts are awaited."""

    jobs: tuple[JobView, ...]


Fact: TypeAlias = (
    MeshFact
    | MeshGone
    | MeshMark
    | CurrentMesh
    | HostFact
    | ProcFact
    | ActorsFact
    | StopFact
    | CellFact
    | CellName
    | Condition
    | FailureFact
    | JobsFact
)


#: The number of failures kept.
MAX_FAILURES = 200
#: Failures of the same kind with the same text within this time are combined into one with several ranks (seconds).
SAME_FAILURE = 2.0
#: The minimum number of changes kept. A reader that is further behind gets the full state.
MAX_CHANGES = 65_536
#: The number of cell names kept.
MAX_CELLS = 2000
#: The maximum length of a cause or text in a view (characters).
MAX_TEXT = 4000

_FIELDS: Final = RankView.__struct_fields__
_BIT: Final = {name: 1 << k for k, name in enumerate(_FIELDS)}
#: Fields that only the board sets.
_DERIVED: Final = frozenset(
    {"mesh", "rank", "host", "proc", "state", "since", "cause", "doing", "doing_since", "stop", "actors", "waiting"}
)
#: The states of ranks in a mesh that may hang.
_BUSY: Final = frozenset({RankState.RUNNING, RankState.STOPPED, RankState.UNRESPONSIVE})
#: The reset values of fields for a process that is gone.
_NOTHING: Final[dict[str, object]] = {
    "doing": "",
    "doing_since": 0.0,
    "waiting": 0,
    "rss": 0,
    "cpu": 0.0,
    "gpu_memory": {},
    "stop": None,
    "actors": (),
}
_MESH, _HOST, _RANK, _FAILURE, _JOB = range(5)


@lru_cache(maxsize=4096)
def _names(mask: int) -> frozenset[str]:
    return frozenset(name for name, bit in _BIT.items() if mask & bit)


class _Rank:
    """A rank: its view, and the data from which the view is computed."""

    __slots__ = ("actors", "cell", "conditions", "mesh", "view")

    def __init__(self, mesh: _Mesh, view: RankView) -> None:
        self.mesh = mesh
        self.view = view
        self.conditions: dict[RankState, tuple[float, str]] = {RankState.STARTING: (view.since, "")}
        self.actors: dict[str, ActorView] = {}
        self.cell: tuple[str, float] = ("", 0.0)


class _Mesh:
    """A mesh: its view, its ranks, and a cached tuple of their views."""

    __slots__ = ("ranks", "view", "views")

    def __init__(self, view: MeshView) -> None:
        self.view = view
        self.ranks: list[_Rank] = []
        self.views: tuple[RankView, ...] | None = None


class Board:
    """The known state of all meshes of a controller. Not thread-safe.

    Args:
        version: the initial version.

    Attributes:
        version: incremented by each change.
        time: the time of the last change.
    """

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.time = 0.0
        self._meshes: dict[str, _Mesh] = {}
        self._hosts: dict[str, HostView] = {}
        self._jobs: dict[str, JobView] = {}
        self._procs: dict[str, _Rank] = {}
        self._cells: dict[str, str] = {}
        self._current = ""
        self._failures: deque[FailureView] = deque(maxlen=MAX_FAILURES)
        self._failed = 0  # the number of failures so far
        self._log: deque[tuple[int, int, Any, int]] = deque()  # version, kind, key, mask of fields
        self._gone: deque[tuple[int, int, str]] = deque(maxlen=MAX_CHANGES)  # meshes, hosts, jobs
        self._forgotten = version  # the newest version whose changes are no longer in the log
        self._next = version  # the version of the change in progress
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
            MeshFact: self._on_mesh,
            MeshGone: self._on_mesh_gone,
            MeshMark: self._on_mark,
            CurrentMesh: self._on_current,
            HostFact: self._on_host,
            ProcFact: self._on_proc,
            ActorsFact: self._on_actors,
            StopFact: self._on_stop,
            CellFact: self._on_cell,
            CellName: self._on_cell_name,
            Condition: self._on_condition,
            FailureFact: self._on_failure,
            JobsFact: self._on_jobs,
        }

    # -- what goes in ---------------------------------------------------------------------------

    def apply(self, fact: Fact, time: float) -> bool:
        """Apply a fact that became known at this time. Return whether the state has changed.

        Raises:
            ValueError: the fact has a field that the view does not have, or that is derived from others.
        """
        self._next = self.version + 1
        before = len(self._log)
        self._handlers[type(fact)](fact, time)
        if len(self._log) == before:
            return False
        self.version = self._next
        self.time = time
        while len(self._log) > MAX_CHANGES:
            self._forgotten = self._log.popleft()[0]
        return True

    def _note(self, kind: int, key: object, mask: int = 0) -> None:
        self._log.append((self._next, kind, key, mask))

    def _on_mesh(self, fact: MeshFact, time: float) -> None:
        for key in dict.fromkeys(fact.hosts):
            if key not in self._hosts:
                self._hosts[key] = HostView(key, fact.host_names.get(key, key))
                self._note(_HOST, key)
        mesh = self._meshes.get(fact.key)
        old = mesh.view if mesh is not None else MeshView(fact.key, fact.name, created=time)
        view = replace(
            old,
            name=fact.name,
            labels=fact.labels,
            sizes=fact.sizes,
            hosts=tuple(dict.fromkeys(fact.hosts)),
            kept=fact.kept,
            current=fact.key == self._current,
        )
        if mesh is None or len(mesh.ranks) != len(fact.procs):
            self._drop(mesh)
            mesh = self._meshes[fact.key] = _Mesh(view)
            for rank, (proc, host) in enumerate(zip(fact.procs, fact.hosts, strict=True)):
                new = _Rank(mesh, RankView(fact.key, rank, host, proc, since=time))
                mesh.ranks.append(new)
                self._procs[proc] = new
            self._note(_MESH, fact.key, 1)
        else:
            for known, proc, host in zip(mesh.ranks, fact.procs, fact.hosts, strict=True):
                if known.view.proc != proc:
                    self._replace(known, proc, host, time)
            if view != old:
                mesh.view = view
                self._note(_MESH, fact.key)
        self._drop_hosts()

    def _replace(self, rank: _Rank, proc: str, host: str, time: float) -> None:
        """Replace a dead process by its successor."""
        old = rank.view
        self._forget_proc(rank)
        self._procs[proc] = rank
        rank.conditions = {RankState.STARTING: (time, "")}
        rank.actors = {}
        rank.cell = ("", 0.0)
        fresh = RankView(old.mesh, old.rank, host, proc, since=time)
        self._put(rank, {name: getattr(fresh, name) for name in _FIELDS})

    def _forget_proc(self, rank: _Rank) -> None:
        if self._procs.get(rank.view.proc) is rank:
            del self._procs[rank.view.proc]

    def _drop(self, mesh: _Mesh | None) -> None:
        for rank in mesh.ranks if mesh is not None else ():
            self._forget_proc(rank)

    def _on_mesh_gone(self, fact: MeshGone, _time: float) -> None:
        mesh = self._meshes.pop(fact.key, None)
        if mesh is not None:
            self._drop(mesh)
            self._note(_MESH, fact.key)
            self._gone.append((self._next, _MESH, fact.key))
            self._drop_hosts()

    def _drop_hosts(self) -> None:
        used = {key for mesh in self._meshes.values() for key in mesh.view.hosts}
        for key in self._hosts.keys() - used:
            del self._hosts[key]
            self._note(_HOST, key)
            self._gone.append((self._next, _HOST, key))

    def _on_mark(self, fact: MeshMark, _time: float) -> None:
        mesh = self._meshes.get(fact.key)
        if mesh is None:
            return
        if not fact.fields.keys() <= {"current", "kept", "hang"}:
            raise ValueError(f"a mark of a mesh is current, kept or hang, not {sorted(fact.fields)}")
        view = replace(mesh.view, **fact.fields)
        if view != mesh.view:
            mesh.view = view
            self._note(_MESH, fact.key)

    def _on_current(self, fact: CurrentMesh, time: float) -> None:
        self._current = fact.key
        for key in self._meshes:
            self._on_mark(MeshMark(key, {"current": key == fact.key}), time)

    def _on_host(self, fact: HostFact, _time: float) -> None:
        old = self._hosts.get(fact.key)
        if old is None:
            return
        view = replace(old, **_checked(fact.fields, HostView, frozenset({"key"})))
        if view != old:
            self._hosts[fact.key] = view
            self._note(_HOST, fact.key)

    def _on_jobs(self, fact: JobsFact, _time: float) -> None:
        jobs = {job.key: job for job in fact.jobs}
        for key in self._jobs.keys() - jobs.keys():
            self._note(_JOB, key)
            self._gone.append((self._next, _JOB, key))
        for key, job in jobs.items():
            if self._jobs.get(key) != job:
                self._note(_JOB, key)
        self._jobs = jobs

    def _living(self, proc: str) -> _Rank | None:
        rank = self._procs.get(proc)
        if rank is None or RankState.DEAD in rank.conditions or RankState.ENDED in rank.conditions:
            return None
        return rank

    def _on_proc(self, fact: ProcFact, time: float) -> None:
        rank = self._living(fact.proc)
        if rank is not None:
            self._put(rank, dict(_checked(fact.fields, RankView, _DERIVED)), time)

    def _on_actors(self, fact: ActorsFact, time: float) -> None:
        rank = self._living(fact.proc)
        if rank is None:
            return
        rank.actors.update(fact.actors)
        for key in fact.gone:
            rank.actors.pop(key, None)
        actors = tuple(rank.actors.values())
        fields: dict[str, object] = {"actors": actors, "waiting": sum(actor.waiting for actor in actors)}
        # The counts of an actor vanish with it, but those of its rank must not decrease.
        for name in ("calls", "failures"):
            fields[name] = max(getattr(rank.view, name), sum(getattr(actor, name) for actor in actors))
        self._put(rank, {**fields, **self._doing(rank)}, time)

    def _on_stop(self, fact: StopFact, time: float) -> None:
        mesh = self._meshes.get(fact.mesh)
        rank = mesh.ranks[fact.rank] if mesh is not None and fact.rank < len(mesh.ranks) else None
        if rank is None or self._living(rank.view.proc) is None:
            return
        stop = fact.stop
        if stop is None:
            rank.conditions.pop(RankState.STOPPED, None)
        else:
            stop = replace(stop, file=self._cell_name(stop.file) or os.path.basename(stop.file))
            rank.conditions[RankState.STOPPED] = (fact.since or time, stop.text)
        self._put(rank, {"stop": stop}, time)

    def _on_cell(self, fact: CellFact, time: float) -> None:
        rank = self._living(fact.proc)
        if rank is not None:
            rank.cell = (fact.cell, fact.since)
            self._put(rank, self._doing(rank), time)

    def _on_cell_name(self, fact: CellName, time: float) -> None:
        self._cells[fact.cell] = fact.name
        if len(self._cells) > MAX_CELLS:
            del self._cells[next(iter(self._cells))]
        for rank in self._procs.values():
            if rank.cell[0].partition(".")[0] == fact.cell or rank.cell[0] == fact.cell:
                self._put(rank, self._doing(rank), time)

    def _cell_name(self, cell: str) -> str:
        """Return the display name of a cell, given its id or its file; "" if unknown."""
        return self._cells.get(cell) or self._cells.get(cell.partition(".")[0], "")

    def _doing(self, rank: _Rank) -> dict[str, object]:
        """Return what a rank runs: a cell, or the endpoint that has run longest."""
        cell, since = rank.cell
        if cell:
            return {"doing": self._cell_name(cell) or "a cell", "doing_since": since}
        busy = [actor for actor in rank.actors.values() if actor.endpoint]
        if not busy:
            return {"doing": "", "doing_since": 0.0}
        first = min(busy, key=lambda actor: actor.since)
        more = f" (+{len(busy) - 1})" if len(busy) > 1 else ""
        return {"doing": f"{first.name}.{first.endpoint}{more}", "doing_since": first.since}

    def _on_condition(self, fact: Condition, time: float) -> None:
        rank = self._procs.get(fact.proc)
        if rank is None:
            return
        over = RankState.DEAD in rank.conditions or RankState.ENDED in rank.conditions
        if over and fact.state is not RankState.HEALING:
            return
        fields: dict[str, object] = {}
        if not fact.holds:
            rank.conditions.pop(fact.state, None)
        elif fact.state in (RankState.DEAD, RankState.ENDED):
            rank.conditions = {fact.state: (fact.since or time, fact.cause[:MAX_TEXT])}
            rank.actors = {}
            rank.cell = ("", 0.0)
            fields = dict(_NOTHING)
        else:
            since = rank.conditions.get(fact.state, (fact.since or time, ""))[0]
            rank.conditions[fact.state] = (since, fact.cause[:MAX_TEXT])
        self._put(rank, fields, time)

    def _on_failure(self, fact: FailureFact, time: float) -> None:
        found: dict[str, set[int]] = {}
        if fact.mesh in self._meshes and not fact.procs:
            found[fact.mesh] = set(range(len(self._meshes[fact.mesh].ranks)))
        for proc in fact.procs:
            rank = self._procs.get(proc)
            if rank is not None:
                found.setdefault(rank.view.mesh, set()).add(rank.view.rank)
        text = fact.text[:MAX_TEXT]
        time = fact.time or time
        for mesh, ranks in found.items():
            at = self._same_failure(mesh, fact.kind, text, time)
            if at is None:
                self._failed += 1
                self._failures.append(FailureView(self._failed, time, mesh, tuple(sorted(ranks)), fact.kind, text))
                self._note(_FAILURE, self._failed)
            elif not ranks <= set((known := self._failures[at]).ranks):
                self._failures[at] = replace(known, ranks=tuple(sorted(ranks.union(known.ranks))))
                self._note(_FAILURE, known.number)

    def _same_failure(self, mesh: str, kind: str, text: str, time: float) -> int | None:
        """Return the position of a recent equal failure of other ranks of the mesh."""
        for at in range(len(self._failures) - 1, -1, -1):
            failure = self._failures[at]
            if failure.time < time - SAME_FAILURE:
                return None
            if (failure.mesh, failure.kind, failure.text) == (mesh, kind, text):
                return at
        return None

    def _put(self, rank: _Rank, fields: dict[str, Any], time: float | None = None) -> None:
        """Set fields of a rank, and its state, which follows from its conditions and activity."""
        view = rank.view
        if time is not None:
            doing = fields.get("doing", view.doing)
            state, since, cause = self._state(rank, doing, fields.get("doing_since", view.doing_since), time)
            if state is not view.state:
                fields["state"], fields["since"] = state, since
            fields["cause"] = cause
        changed = {name: value for name, value in fields.items() if getattr(view, name) != value}
        if changed:
            rank.view = replace(view, **changed)
            rank.mesh.views = None
            if rank.mesh.view.hang and not any(each.view.state in _BUSY for each in rank.mesh.ranks):
                rank.mesh.view = replace(rank.mesh.view, hang="")
                self._note(_MESH, view.mesh)
            mask = 0
            for name in changed:
                mask |= _BIT[name]
            self._note(_RANK, (view.mesh, view.rank), mask)

    def _state(self, rank: _Rank, doing: str, doing_since: float, time: float) -> tuple[RankState, float, str]:
        """Return the worst condition that holds, its start, and its cause.

        A dead rank that is being healed counts as healing.
        """
        conditions = rank.conditions
        if RankState.HEALING in conditions and RankState.DEAD in conditions:
            since, why = conditions[RankState.HEALING]
            return RankState.HEALING, since, conditions[RankState.DEAD][1] or why
        if conditions:
            worst = min(conditions, key=STATE_ORDER.__getitem__)
            return worst, *conditions[worst]
        if doing:
            return RankState.RUNNING, doing_since or time, ""
        return RankState.IDLE, time, ""

    # -- what comes out -------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the complete state."""
        return Snapshot(
            self.version,
            self.time,
            {key: mesh.view for key, mesh in self._meshes.items()},
            dict(self._hosts),
            {key: self._views(mesh) for key, mesh in self._meshes.items()},
            tuple(self._failures),
            dict(self._jobs),
        )

    @staticmethod
    def _views(mesh: _Mesh) -> tuple[RankView, ...]:
        if mesh.views is None:
            mesh.views = tuple(rank.view for rank in mesh.ranks)
        return mesh.views

    def since(self, version: int) -> Delta:
        """Return the changes since that version.

        For version 0, or if the changes are no longer kept, return everything.
        """
        meshes: dict[str, int] = {}
        hosts: dict[str, int] = {}
        jobs: dict[str, int] = {}
        masks: dict[tuple[str, int], int] = {}
        failed: set[int] = set()
        if version < self._forgotten:
            meshes, hosts = dict.fromkeys(self._meshes, 1), dict.fromkeys(self._hosts, 0)
            jobs = dict.fromkeys(self._jobs, 0)
            for changed, kind, key in self._gone:
                if changed > version:
                    {_MESH: meshes, _HOST: hosts, _JOB: jobs}[kind].setdefault(key, 0)
            failed = {failure.number for failure in self._failures}
        for changed, kind, key, mask in reversed(self._log):
            if changed <= version:
                break
            if kind == _RANK:
                masks[key] = masks.get(key, 0) | mask
            elif kind == _MESH:
                meshes[key] = meshes.get(key, 0) | mask
            elif kind == _HOST:
                hosts[key] = 0
            elif kind == _JOB:
                jobs[key] = 0
            else:
                failed.add(key)
        known = self._meshes
        ranks: dict[tuple[str, int], RankView] = {}
        fields: dict[tuple[str, int], frozenset[str]] = {}
        for key, mask in masks.items():
            mesh = known.get(key[0])
            if mesh is not None and not meshes.get(key[0]):
                ranks[key] = mesh.ranks[key[1]].view
                fields[key] = _names(mask)
        for name, new in meshes.items():
            if new and name in known:
                ranks.update({(name, view.rank): view for view in self._views(known[name])})
        return Delta(
            version,
            self.version,
            self.time,
            {key: known[key].view for key in meshes if key in known},
            {key: self._hosts[key] for key in hosts if key in self._hosts},
            ranks,
            fields,
            tuple(key for key in meshes if key not in known),
            tuple(key for key in hosts if key not in self._hosts),
            tuple(failure for failure in self._failures if failure.number in failed) if failed else (),
            {key: self._jobs[key] for key in jobs if key in self._jobs},
            tuple(key for key in jobs if key not in self._jobs),
        )


def _checked(fields: dict[str, object], view: type[msgspec.Struct], derived: frozenset[str]) -> dict[str, object]:
    for name in fields:
        if name not in view.__struct_fields__ or name in derived:
            raise ValueError(f"no source may set {name!r} of a {view.__name__}")
    return fields


def advanced(snapshot: Snapshot, delta: Delta) -> Snapshot:
    """Return the snapshot that results from applying a delta.

    Raises:
        ValueError: the delta begins after the snapshot's version, so that changes between them are missing.
    """
    if delta.base > snapshot.version:
        raise ValueError(f"changes since version {delta.base} do not follow version {snapshot.version}")
    meshes = {key: view for key, view in snapshot.meshes.items() if key not in delta.gone_meshes} | delta.meshes
    hosts = {key: view for key, view in snapshot.hosts.items() if key not in delta.gone_hosts} | delta.hosts
    jobs = {key: view for key, view in snapshot.jobs.items() if key not in delta.gone_jobs} | delta.jobs
    ranks: dict[str, list[RankView]] = {key: list(views) for key, views in snapshot.ranks.items() if key in meshes}
    for (mesh, rank), view in delta.ranks.items():
        if (mesh, rank) not in delta.fields and rank == 0:  # a new mesh: all its ranks follow, in their order
            ranks[mesh] = []
        if rank == len(ranks.setdefault(mesh, [])):
            ranks[mesh].append(view)
        else:
            ranks[mesh][rank] = view
    failures = {failure.number: failure for failure in (*snapshot.failures, *delta.failures)}
    kept = [failures[number] for number in sorted(failures)][-MAX_FAILURES:]
    return Snapshot(
        delta.version,
        delta.time,
        meshes,
        hosts,
        {key: tuple(ranks.get(key, ())) for key in meshes},
        tuple(kept),
        jobs,
    )
