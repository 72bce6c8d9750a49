"""Jobs as views of the notebook get them: those that it waits for, and all of this user."""

from __future__ import annotations

from monarch_kernel.kernel.engine_places import EnginePlaces
from monarch_kernel.launchers.base import HostPhase, JobStatus
from monarch_kernel.launchers.listing import ListedJob
from monarch_kernel.watch.model import JobView


def awaited(places: EnginePlaces) -> tuple[JobView, ...]:
    """The jobs whose hosts meshes of the notebook wait for."""
    return tuple(
        _view(place.job.job_id, place.engine, place.status, mesh=name, hosts=sum(place.job.meshes.values()))
        for name, place in places.items()
        if place.waiting and place.job.job_id
    )


def listed(job: ListedJob, places: EnginePlaces) -> JobView:
    """A job of the list."""
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
