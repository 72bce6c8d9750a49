"""The source of facts from a notebook for watches (`monarch_kernel.watch`).

The facts are the mesh in use, the names and failures of cells, the jobs whose hosts are awaited, and the hosts whose
walltime ends soon.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from monarch_kernel.introspection import whole_of
from monarch_kernel.kernel.output.cell_errors import WalltimeNotices
from monarch_kernel.kernel.session import MeshSession, ProviderPlacements
from monarch_kernel.launchers.base import HostPhase, JobStatus
from monarch_kernel.launchers.listing import ListedJob
from monarch_kernel.launchers.walltime import WalltimeNotice
from monarch_kernel.meshes import on_change
from monarch_kernel.runtime.actor.errors import ActorError
from monarch_kernel.watch.board import CellName, CurrentMesh, FailureFact, HostFact, JobsFact
from monarch_kernel.watch.model import JobView
from monarch_kernel.watch.sources import Give

if TYPE_CHECKING:
    from monarch_kernel.kernel.cell_run import CellRun
    from monarch_kernel.protocol.faults import Fault

#: How many failures of cells are kept for watches that begin later.
_KEPT = 32


class NotebookFacts:
    """A source of facts for ``monarch_kernel.watch.provide``. Without a watch, each method only returns.

    Args:
        session: the meshes.
        cells: the number of each cell by its key, as the notebook keeps them.
        walltimes: the hosts whose walltime ends soon.
    """

    def __init__(self, session: MeshSession, cells: Mapping[str, int], walltimes: WalltimeNotices) -> None:
        self._session = session
        self._cells = cells
        self._walltimes = walltimes
        self._give: Give | None = None
        self._current = ""
        self._failures: deque[FailureFact] = deque(maxlen=_KEPT)

    def source(self, give: Give) -> Callable[[], None]:
        """Start reporting facts; see ``monarch_kernel.watch.sources.Source``."""
        self._give = give
        self._current = ""
        changes = (
            on_change(self._update),
            self._session.changed.subscribe(self._update),
            self._walltimes.changed.subscribe(self._walltime),
            self._session.provider_hosts.changed.subscribe(self._jobs),
        )
        give(*(CellName(key, _name(number)) for key, number in dict(self._cells).items()))
        self._update()
        self._jobs()
        give(*self._failures)

        def end() -> None:
            self._give = None
            for each in changes:
                each.close()

        return end

    def cell(self, key: str, number: int) -> None:
        """Record that a cell begins; ``key`` is the prefix of its run ids on ranks, or its file."""
        if self._give is not None:
            self._give(CellName(key, _name(number)))

    def cell_ended(self, run: CellRun) -> None:
        """Report the errors of a `%%mesh` cell that has ended on all its ranks."""
        own = [failed for failed in run.failures.values() if not failed.of_peer] or list(run.failures.values())
        procs = run.managed.procs._target().procs
        self._failed(run.cell.id, ((procs[failed.rank].id, failed.fault) for failed in own))

    def call_failed(self, key: str, error: BaseException) -> None:
        """Report an error that ended an ordinary cell, if endpoints raised it."""
        if isinstance(error, ActorError):
            self._failed(key, ((failure.proc, failure.fault) for failure in error.failures))

    def _failed(self, key: str, faults: Iterable[tuple[str, Fault | None]]) -> None:
        number = self._cells.get(key.partition(".")[0])
        name = "a cell" if number is None else _name(number)
        found: dict[str, list[str]] = {}
        for proc, fault in faults:
            if fault is not None and fault.type_name != "KeyboardInterrupt":
                found.setdefault(f"{name} failed: {fault.summary.partition(chr(10))[0]}", []).append(proc)
        facts = [FailureFact("error", text, tuple(procs), time=time.time()) for text, procs in found.items()]
        self._failures += facts
        if self._give is not None:
            self._give(*facts)

    def _update(self) -> None:
        """Report the mesh in use, if it has changed."""
        give = self._give
        if give is None:
            return
        name = self._session.current
        mesh = self._session.proc_meshes().get(name) if name is not None else None
        current = whole_of(mesh).uid if mesh is not None else ""
        if current != self._current:
            self._current = current
            give(CurrentMesh(current))
        for notice in self._walltimes.near():  # a board learns hosts that it does not know yet with their first mesh
            give(*self._ending(notice))

    def _walltime(self, notice: WalltimeNotice, text: str) -> None:
        """Report hosts whose walltime ends soon, as a new event."""
        if self._give is not None:
            workers = {host.worker for host in notice.hosts}
            meshes = self._session.proc_meshes().values()
            procs = tuple(ref.id for mesh in meshes for ref in mesh._target().procs if ref.agent in workers)
            self._give(*self._ending(notice), FailureFact("walltime", text, procs))

    def _jobs(self) -> None:
        """Report the jobs whose hosts are awaited."""
        if self._give is not None:
            self._give(JobsFact(awaited(self._session.provider_hosts)))

    def _ending(self, notice: WalltimeNotice) -> list[HostFact]:
        then = notice.then(self._walltimes.otherwise(notice))
        return [HostFact(host.worker, {"ends_at": host.ends_at, "then": then}) for host in notice.hosts]


def _name(number: int) -> str:
    return f"cell [{number}]"


def awaited(places: ProviderPlacements) -> tuple[JobView, ...]:
    """Return the jobs whose hosts meshes of the notebook wait for."""
    return tuple(
        _view(place.job.job_id, place.engine, place.status, mesh=name, hosts=sum(place.job.meshes.values()))
        for name, place in places.items()
        if place.waiting and place.job.job_id
    )


def listed(job: ListedJob, places: ProviderPlacements) -> JobView:
    """Return a job as an entry of the list of jobs."""
    mesh = next((name for name, place in places.items() if place.job.job_id == job.job), "")
    return _view(
        job.job,
        job.engine,
        job.status,
        mesh=mesh,
        hosts=0 if job.record is None else sum(map(len, job.record.meshes.values())),
        ended=job.ended,
        used_by="" if mesh else job.used_by,
        error=job.error,
    )


def _view(
    key: str,
    engine: str,
    status: JobStatus | None,
    *,
    mesh: str,
    hosts: int,
    ended: bool = False,
    used_by: str = "",
    error: str = "",
) -> JobView:
    known = () if status is None else status.hosts
    waiting = [host for host in known if host.state is not HostPhase.UP]
    return JobView(
        key,
        engine,
        mesh,
        len(known) or hosts,
        len(known) - len(waiting),
        "" if status is None else status.reason,
        min((host.since for host in waiting if host.since), default=0.0),
        max((host.expected_start for host in waiting), default=0.0),
        min((host.ends_at for host in known if host.ends_at and host.state is HostPhase.UP), default=0.0),
        ended,
        used_by,
        error,
    )
