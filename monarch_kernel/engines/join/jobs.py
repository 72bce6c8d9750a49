"""Joinable jobs: the prepared ranks of this user, grouped by job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
