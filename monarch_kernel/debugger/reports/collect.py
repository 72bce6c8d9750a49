"""Make a report: join a job as an observer, query its ranks, and leave it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from monarch_kernel.debugger.controller.hang import hang
from monarch_kernel.debugger.controller.query import ask
from monarch_kernel.debugger.controller.stacks import stacks
from monarch_kernel.debugger.controller.stragglers import StragglerReport, stragglers
from monarch_kernel.debugger.outside.processes import figures
from monarch_kernel.debugger.rank.versions import versions_here
from monarch_kernel.debugger.reports.job_report import JobFacts, JobReport, RankFacts
from monarch_kernel.display.quantities import duration
from monarch_kernel.engines import tool_runtime
from monarch_kernel.engines.join.announcements import JoinError, RankAnnouncement, announcements, began_at, pid_space
from monarch_kernel.engines.join.jobs import JoinableJob
from monarch_kernel.engines.join.rank_machines import greet

#: The maximum number of collectives in a report, over all ranks, and the minimum for each rank.
_CALLS, _LEAST = 100_000, 20
#: The time limit for ranks to report their versions (seconds).
_VERSIONS = 1.0

REQUESTED = "a report on request."


def collect(
    name: str, reason: str = REQUESTED, machines: Mapping[str, Sequence[str]] | None = None, meet: str = ""
) -> JobReport:
    """Collect what the ranks of a job do now. Nothing is stopped, no code of the job is called, and no value is read.

    Ranks that do not answer are read from outside.

    Args:
        name: the name of the job, which this process has not joined.
        reason: the reason for the report, as a sentence.
        machines, meet: further locations of its ranks; see ``JoinController.add_machines``.

    Raises:
        JoinError: there is no such job, none of its ranks can be reached, or a machine cannot be reached.
    """
    jobs = tool_runtime().joined_jobs()
    jobs.add_machines(machines or {}, meet)
    known = [job for job in jobs.joinable() if job.name == name]
    procs = jobs.join(name, looks_on=True)
    try:
        held = jobs.held_ranks(procs)
        verdict = hang(procs)
        user, threads = stacks(procs), stacks(procs, all_threads=True)
        late = _trimmed(stragglers(procs, timeout=2.0))
        told = ask(procs, versions_here, timeout=_VERSIONS)
        ranks = _ranks(jobs.announced(procs), set(told.values))
        job = replace(_facts(known[0], ranks, reason), world=len(procs), versions=_versions(told.values))
    finally:
        jobs.leave(procs)
    return JobReport(job, verdict, user, threads, late, [f"Rank {rank} is held after {held[rank]}." for rank in held])


def collect_hang(name: str, reason: str) -> JobReport:
    """Collect a report on a job that makes no progress, for a rank of this machine that has detected it.

    If the job's machines use a meeting point, the report of the machine with rank 0 covers all ranks. The report of
    each other machine covers its own ranks.
    """
    meet = next((each.meet for each in announcements() if each.name == name and each.identity.rank == 0), "")
    if meet:
        try:
            return collect(name, reason, meet=meet)
        except JoinError as error:
            note = f"Ranks of other machines are missing: {error}."
            report = collect(name, reason)
            report.notes = (*report.notes, note)
            return report
    return collect(name, reason)


def hang_reason(name: str, after: float, waits: bool) -> str:
    """Describe why a report is made that a rank of this machine has requested because it makes no progress.

    Args:
        name: the name of the job.
        after: how long ranks have made no progress (seconds).
        waits: whether that rank waits in a collective. If so, other ranks count as making progress only if they issue
            collectives. That they reach other instructions does not count, because they also do so in endless loops.

    Returns:
        A sentence; "" if another rank makes progress, so there is nothing to report.
    """
    since = time.time() - after
    for found, connection in greet(each for each in announcements() if each.name == name and _is_here(each)):
        connection.close()
        if max(found.issued, 0.0 if waits else found.moved) > since:
            return ""
    return f"no progress for {duration(after)}."


def _facts(job: JoinableJob, ranks: tuple[RankFacts, ...], reason: str) -> JobFacts:
    return JobFacts(
        name=job.name,
        launch=job.launch,
        program=job.program,
        world=job.world,
        since=job.since,
        made=time.time(),
        host=socket.gethostname(),
        reason=reason,
        ranks=ranks,
    )


def _is_here(announced: RankAnnouncement) -> bool:
    """Return whether it is a living process of this machine, in the same PID namespace as this process."""
    near = announced.host == socket.gethostname() and announced.space == pid_space()
    return near and began_at(announced.pid) == announced.began


def _ranks(announced: Mapping[int, RankAnnouncement], answered: Iterable[int]) -> tuple[RankFacts, ...]:
    """Return the processes, with their state as seen from this machine."""
    answers = set(answered)
    found: list[RankFacts] = []
    for rank, each in sorted(announced.items()):
        fact = RankFacts(rank, each.host, each.pid, rank in answers, each.since, each.identity.restarts)
        seen = figures(each.pid) if _is_here(each) else None
        if seen is not None:
            fact = replace(fact, state=seen.state, wchan=seen.wchan, threads=seen.threads, rss=seen.rss)
        found.append(fact)
    return tuple(found)


def _versions(told: Mapping[int, dict[str, str]]) -> dict[str, dict[str, tuple[int, ...]]]:
    found: dict[str, dict[str, Any]] = {}
    for rank, versions in sorted(told.items()):
        for name, version in versions.items():
            by_version = found.setdefault(name, {})
            by_version[version] = (*by_version.get(version, ()), rank)
    return found


def _trimmed(report: StragglerReport) -> StragglerReport | None:
    """Limit a report to the latest collectives for a file; None if no collective is recorded on all its ranks."""
    if not report.found.meetings:
        return None
    most = max(_LEAST, _CALLS // len(report.records))
    records = [replace(record, calls=record.calls[-most:]) for record in report.records]
    return StragglerReport(report.name, records, report.last)
