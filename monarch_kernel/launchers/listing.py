"""List all jobs of this user, of all providers, with the state of the programs that requested them."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_kernel.display.quantities import duration
from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.launchers import registry
from monarch_kernel.launchers.base import (
    HostPhase,
    HostStatus,
    JobStatus,
    Launcher,
    LaunchError,
    Ticket,
    host_log,
    launcher_class,
    launcher_names,
)
from monarch_kernel.launchers.engine_job import EngineJob
from monarch_kernel.launchers.registry import JobRecord

#: The number of providers that are queried in parallel.
_AT_ONCE = 16


@dataclass(frozen=True)
class ListedJob:
    """A job, with the status of its hosts.

    Attributes:
        job: its id.
        engine: the name of its launcher.
        status: the status of its hosts; None: the provider does not answer.
        error: why it does not answer; "": it does.
        record: its record in the list of jobs; None: it is not in the list, but its provider knows it.
        found: the launcher and ticket of a job that is not in the list.
    """

    job: str
    engine: str
    status: JobStatus | None
    error: str = ""
    record: JobRecord | None = None
    found: tuple[Launcher, Ticket] | None = None

    @property
    def orphan(self) -> bool:
        """Whether no program of this host is known to use it."""
        return self.record is None or registry.lives(self.record.holder) is False

    @property
    def is_left(self) -> bool:
        """Whether it is in the list, and its program has ended.

        A job that is not in this list may be in another one, and in use.
        """
        return self.record is not None and self.orphan

    @property
    def ended(self) -> bool:
        """Whether all its hosts are gone."""
        return self.status is not None and not any(host.state is not HostPhase.GONE for host in self.status.hosts)

    @property
    def used_by(self) -> str:
        """The program that uses it."""
        if self.record is None:
            return "not in this list of jobs"
        host, pid = [*self.record.holder.split(), "", ""][:2]
        if not pid:
            return self.record.creator
        if self.record.holder == registry.this_process():
            return "this process"
        lives = registry.lives(self.record.holder)
        return f"process {pid}" + {None: f" on {host}", True: "", False: ", which has ended"}[lives]

    def plain(self) -> dict[str, Any]:
        """Return the job as plain data, for ``--json``."""
        record, status = self.record, self.status
        return {
            "job": self.job,
            "engine": self.engine,
            "meshes": {} if record is None else {name: len(numbers) for name, numbers in record.meshes.items()},
            "created": None if record is None else record.created,
            "folder": None if record is None else record.folder,
            "used_by": self.used_by,
            "orphan": self.orphan,
            "error": self.error,
            "hosts": [] if status is None else [plain_host(host) for host in status.hosts],
        }

    def end(self) -> None:
        """End its hosts, and remove it from the list.

        Raises:
            LaunchError, OSError: its provider cannot be queried.
        """
        if self.record is not None:
            EngineJob.find(self.job).kill()
        elif self.found is not None:
            self.found[0].end(self.found[1])

    def log(self, host: int | None, lines: int) -> str:
        """Return the output of its workers; see ``EngineJob.log``."""
        if self.record is not None:
            return EngineJob.find(self.job).log(host, lines)
        assert self.found is not None
        launcher, ticket = self.found
        if host is not None:
            return host_log(launcher, ticket, host, lines)
        numbers = range(ticket.hosts)
        return "\n".join(f"== host {number} ==\n{launcher.log(ticket, number, lines)}" for number in numbers)


@dataclass(frozen=True, repr=False)
class JobList(AsTable):
    """All jobs of this user, as a table."""

    jobs: Sequence[ListedJob]
    notes: Sequence[str] = ()

    def table(self) -> TableView:
        """Return one row per job."""
        now = time.time()
        rows: list[list[str]] = []
        for each in self.jobs:
            record = each.record
            meshes = {} if record is None else record.meshes
            age = "" if record is None else duration(max(0.0, now - record.created))
            rows.append(
                [
                    each.job,
                    each.engine,
                    ", ".join(f"{name}={len(numbers)}" for name, numbers in meshes.items()),
                    each.error or ("ended" if each.ended else str(each.status)),
                    age,
                    each.used_by,
                    "" if record is None else record.folder,
                ]
            )
        headings = ["job", "engine", "meshes", "hosts", "since", "used by", "folder"]
        return TableView(headings, rows, right=(4,), note="\n".join(self.notes)).without_empty_columns()


@dataclass(frozen=True, repr=False)
class HostList(AsTable):
    """The hosts of a job, as a table."""

    caption: str
    status: JobStatus

    def table(self) -> TableView:
        """Return one row per host."""
        now = time.time()
        rows = [
            [
                str(host.host),
                host.name,
                str(host.state),
                duration(now - host.since) if host.since else "",
                ", ".join(host.devices or ()),
                f"in {duration(max(0.0, host.expected_start - now))}" if host.expected_start else "",
                f"in {duration(max(0.0, host.ends_at - now))}" if host.ends_at else "",
                host.reason,
            ]
            for host in self.status.hosts
        ]
        headings = ["host", "name", "state", "for", "devices", "expected", "ends", "reason"]
        return TableView(headings, rows, self.caption, right=(0,)).without_empty_columns()


def own_jobs() -> list[ListedJob]:
    """Return the jobs in the list, oldest first. Providers are queried in parallel."""
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "monarch-jobs") as pool:
        return list(pool.map(_listed, registry.records()))


def list_jobs(known: Mapping[str, JobStatus] | None = None, *, own_process: bool = False) -> JobList:
    """Return all listed jobs, and others that providers know, oldest first. Providers are queried in parallel.

    A job without a ticket, because its program was killed during the request, is listed without hosts.

    Args:
        known: by job id, the status of jobs that this process waits for; their providers are not queried again.
        own_process: see ``Launcher.found``.
    """
    records = registry.records()
    notes: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "monarch-jobs") as pool:
        listed = pool.map(lambda record: _listed(record, (known or {}).get(record.job)), records)
        beside = [(name, pool.submit(_beside, name, own_process)) for name in launcher_names()]
        jobs = list(listed)
        in_list = {record.job for record in records}
        for name, answer in beside:
            try:
                others = [found for found in answer.result() if found[1].job not in in_list]
            except (LaunchError, OSError) as e:
                notes.append(f"{name} cannot be asked for further jobs: {e}")
                continue
            for launcher, ticket in others:
                status, error = _poll(launcher, ticket)
                jobs.append(ListedJob(ticket.job, name, status, error, None, (launcher, ticket)))
    return JobList(jobs, notes)


def job_named(text: str, jobs: Sequence[ListedJob]) -> ListedJob:
    """Return the job whose id equals, or begins with, a text.

    Raises:
        LaunchError: there is no such job, or there are several.
    """
    ids = [job.job for job in jobs]
    found = id_of(text, ids)
    if found is None:
        raise LaunchError(
            f"there is no one job of yours that is {text!r}, or begins so (there are: {', '.join(ids) or 'none'})"
        )
    return jobs[ids.index(found)]


def find_job(text: str) -> ListedJob:
    """Return the job whose id equals, or begins with, a text, for a command of this package.

    Providers are queried for further jobs only if it is not in the list.

    Raises:
        LaunchError: there is no such job, or there are several.
    """
    records = {record.job: record for record in registry.records()}
    own = id_of(text, list(records))
    return job_named(text, list_jobs(own_process=True).jobs) if own is None else _listed(records[own])


def id_of(text: str, ids: Sequence[str]) -> str | None:
    """Return the only id that equals a text, or begins with it (at least four characters); else None."""
    found = [each for each in ids if each == text or (len(text) >= 4 and each.startswith(text))]
    return found[0] if len(found) == 1 else None


def plain_host(host: HostStatus) -> dict[str, object]:
    """Return a host as plain data, for ``--json``."""
    return {
        "host": host.host,
        "name": host.name,
        "state": str(host.state),
        "url": host.url,
        "reason": host.reason,
        "since": host.since or None,
        "expected_start": host.expected_start or None,
        "ends_at": host.ends_at or None,
        "devices": None if host.devices is None else list(host.devices),
        "exit_code": host.exit_code,
    }


def _listed(record: JobRecord, known: JobStatus | None = None) -> ListedJob:
    if known is not None:
        return ListedJob(record.job, record.launcher, known, "", record)
    if record.ticket is None:
        return ListedJob(record.job, record.launcher, None, "its engine was being asked", record)
    try:
        launcher = launcher_class(record.launcher).of(record.options)
    except (LaunchError, TypeError, ValueError) as e:
        return ListedJob(record.job, record.launcher, None, str(e), record)
    status, error = _poll(launcher, record.ticket)
    if status is not None:
        members = {number for numbers in record.meshes.values() for number in numbers}
        status = JobStatus(tuple(host for host in status.hosts if host.host in members))
    return ListedJob(record.job, record.launcher, status, error, record)


def _poll(launcher: Launcher, ticket: Ticket) -> tuple[JobStatus | None, str]:
    try:
        return launcher.poll(ticket), ""
    except (LaunchError, OSError) as e:
        return None, str(e)


def _beside(name: str, own_process: bool) -> list[tuple[Launcher, Ticket]]:
    return launcher_class(name).found(own_process=own_process)
