"""Joinable jobs: the prepared ranks of this user, grouped by job."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_kernel.display.quantities import duration
from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.engines.join.announcements import JoinError, RankAnnouncement


@dataclass(frozen=True)
class JoinableJob:
    """A job whose ranks can be joined.

    Attributes:
        name: the name that its ranks were prepared under.
        launch: its launch; see ``identity.RankIdentity.launch``.
        ranks: its processes, sorted by rank if known.
    """

    name: str
    launch: str
    ranks: tuple[RankAnnouncement, ...]

    @property
    def world(self) -> int:
        """The number of ranks, as far as they know it. Some may run on machines that were not queried."""
        return max(len(self.ranks), self.told_world)

    @property
    def told_world(self) -> int:
        """The number of ranks reported by its launcher; 0 if unknown."""
        return max(each.identity.world for each in self.ranks)

    @property
    def engine(self) -> str:
        """The launcher that started it, if known."""
        first = self.launch.partition(" ")[0]
        return first if first in ("torchrun", "Slurm", "MPI", "Ray") else "program"

    @property
    def since(self) -> float:
        """When the first of its ranks was prepared (seconds since 1970)."""
        return min(each.since for each in self.ranks)

    @property
    def hosts(self) -> list[str]:
        """The machines of its known ranks."""
        return list(dict.fromkeys(each.host for each in self.ranks))

    @property
    def program(self) -> str:
        """The command line of its first rank."""
        return self.ranks[0].program


def jobs_of(found: Iterable[RankAnnouncement]) -> list[JoinableJob]:
    """Group ranks into jobs. Of two processes with the same rank, the later one counts: it replaced the other."""
    by_job: dict[tuple[str, str], dict[object, RankAnnouncement]] = {}
    for each in found:
        ranks = by_job.setdefault((each.name, each.identity.launch), {})
        rank = each.identity.rank
        key: object = rank if rank >= 0 else (each.host, each.pid)
        if key not in ranks or ranks[key].since < each.since:
            ranks[key] = each
    for ranks in by_job.values():  # helpers of ranks with known numbers, such as a Ray controller, are no ranks
        unknown = [key for key, each in ranks.items() if each.identity.rank < 0]
        for key in unknown if len(unknown) < len(ranks) else ():
            del ranks[key]
    jobs = [
        JoinableJob(name, launch, tuple(sorted(ranks.values(), key=lambda each: (each.identity.rank, each.since))))
        for (name, launch), ranks in by_job.items()
    ]
    return sorted(jobs, key=lambda job: job.since)


def job_named(name: str, found: Iterable[RankAnnouncement]) -> JoinableJob:
    """Return the job of that name.

    Raises:
        JoinError: there is no such job, or there are several.
    """
    jobs = jobs_of(found)
    chosen = [job for job in jobs if job.name == name]
    # A program that starts a job and has its variables is not one of its ranks.
    chosen = [job for job in chosen if any(each.identity.known for each in job.ranks)] or chosen
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        launches = "; ".join(f"{job.launch or 'one'} with {len(job.ranks)} ranks" for job in chosen)
        raise JoinError(
            f"{len(chosen)} jobs are named {name!r} ({launches}): give each a different name in MONARCH_KERNEL_JOIN"
        )
    known = ", ".join(dict.fromkeys(job.name for job in jobs)) or "none"
    raise JoinError(
        f"there is no job {name!r} to join (there are: {known}); its ranks have to be started with "
        "-m monarch_kernel.join, or with MONARCH_KERNEL_JOIN=NAME where monarch-kernel join install was run"
    )


# The table of joinable jobs.


@dataclass(frozen=True, repr=False)
class JoinableList(AsTable):
    """The jobs of this user that can be joined.

    Attributes:
        jobs: the jobs, oldest first.
        joined: the names of the jobs that this process has joined.
    """

    jobs: Sequence[JoinableJob]
    joined: Sequence[str] = ()

    def table(self) -> TableView:
        """Return one row per job."""
        now = time.time()
        rows: list[list[str]] = []
        for job in self.jobs:
            known, world = len(job.ranks), job.world
            joined = job.name in self.joined
            rows.append(
                [
                    job.name,
                    job.engine,
                    f"ranks={known}" if known == world else f"ranks={known} of {world}",
                    ", ".join(job.hosts),
                    duration(max(0.0, now - job.since)),
                    "this notebook" if joined else f"%mesh join {job.name}",
                    job.ranks[0].folder,
                    job.program,
                ]
            )
        # The columns of `launchers.listing.JobList`, so that both can be combined into one table.
        headings = ["job", "engine", "meshes", "hosts", "since", "used by", "folder", "program"]
        return TableView(headings, rows, right=(4,))

    def plain(self) -> list[dict[str, Any]]:
        """Return the jobs as plain data, for ``--json``."""
        return [
            {
                "name": job.name,
                "launch": job.launch,
                "world": job.world,
                "hosts": job.hosts,
                "since": job.since,
                "program": job.program,
                "ranks": [
                    {"rank": each.identity.rank, "host": each.host, "pid": each.pid, "restarts": each.identity.restarts}
                    for each in job.ranks
                ],
            }
            for job in self.jobs
        ]
