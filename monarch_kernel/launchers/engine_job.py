"""``EngineJob``: a job whose hosts come from an engine, through any ``Launcher``."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from monarch_kernel.actor import HostMesh, attach_to_workers
from monarch_kernel.launchers import registry, walltime
from monarch_kernel.launchers.at_once import each_at_once
from monarch_kernel.launchers.base import (
    HostPhase,
    HostStatus,
    JobStatus,
    Launcher,
    LaunchError,
    LaunchRequest,
    Resources,
    Secret,
    StartFailedError,
    StartTimeoutError,
    Ticket,
    WorkerCommand,
    host_log,
    keyless,
    launcher_class,
)
from monarch_kernel.launchers.job import Job, JobState, checked_meshes
from monarch_kernel.launchers.registry import JobRecord
from monarch_kernel.launchers.tunnel import reaches
from monarch_kernel.launchers.walltime import WalltimeMonitor, WalltimeNotice
from monarch_kernel.workers import key_text, new_key_text

log = logging.getLogger(__name__)

#: Time without a controller after which the workers of a job end (seconds).
IDLE = 600.0
#: How long to wait for hosts (seconds).
TIMEOUT = 600.0
#: How long before the end of a walltime to warn (seconds).
WARN_BEFORE = 300.0
#: How long a warning waits for the hosts that are asked for then (seconds), and the part of ``warn_before``.
_RENEWAL, _RENEWAL_PART = 30.0, 0.5
#: How many addresses are tried at once.
_AT_ONCE = 16
#: How often an engine is asked while hosts start: soon at first, then less often (seconds).
_FIRST_POLL, _LAST_POLL = 0.05, 2.0
_LOG_LINES = 20
#: How long a host that is up may take to answer (seconds).
_ATTACH_TIME = 30.0
#: How long a host may take to end in good order (seconds).
_RELEASE_TIME = 5.0
#: How long the port of one that is to end may take to answer (seconds).
_DIAL_TIME = 1.0


class EngineJob(Job):
    """A job whose hosts an engine provides.

    The engine is asked by ``apply``, which returns when it has taken the request; ``state`` waits for the hosts, and
    attaches to them. A later program finds the job by the file of ``state``, or by the list of all jobs. Its workers
    end after ``idle`` seconds without a controller, whatever has happened.

    Args:
        launcher: asks the engine.
        meshes: the number of hosts of each mesh, by its name.
        resources: what each host must have.
        env: environment variables for the workers and all processes on them. They are sent as secrets are.
        python: the interpreter on the hosts; by default the path of this one.
        idle: seconds without a controller after which workers end.
        timeout: how long ``state`` waits for hosts (seconds).
        name: what the engine may call the job.
        key_file: the key of its workers; by default each job has a key of its own. Ranks of two jobs can send
            messages to each other only if their workers trust each other's key.
        keep_partial: whether hosts that are up stay when others could not be started in time.
        on_progress: called with the status whenever it has changed while ``state`` waits.
        on_walltime: called before the walltime of hosts ends, on a thread of its own: the place to save work. By
            default a notebook shows the notice, and any other program logs it.
        warn_before: how long before (seconds).
        renew: whether hosts in their places are asked for then. They replace these when a mesh heals that was spawned
            with ``spares=job``.
    """

    #: Whether meshes may be added before it is applied.
    _adds_meshes = False

    def __init__(
        self,
        launcher: Launcher,
        meshes: Mapping[str, int],
        *,
        resources: Resources | None = None,
        env: Mapping[str, str] | None = None,
        python: str = "",
        idle: float = IDLE,
        timeout: float = TIMEOUT,
        name: str = "monarch",
        key_file: str | os.PathLike[str] | None = None,
        keep_partial: bool = False,
        on_progress: Callable[[JobStatus], None] | None = None,
        on_walltime: Callable[[WalltimeNotice], None] | None = None,
        warn_before: float = WARN_BEFORE,
        renew: bool = False,
    ) -> None:
        if key_file is None and (others := launcher.others()):
            raise ValueError(keyless(others))
        super().__init__()
        self._launcher = launcher
        self._requested = checked_meshes(type(self).__name__, meshes) if meshes or not self._adds_meshes else {}
        self._resources = resources or Resources()
        self._env = dict(env or {})
        self._python = python
        self._idle = idle
        self._name = name
        self._key_file = None if key_file is None else os.path.abspath(os.path.expanduser(os.fspath(key_file)))
        self.timeout = timeout
        self.keep_partial = keep_partial
        self.on_progress = on_progress
        self.on_walltime = on_walltime
        self.renew = renew
        self._warn_before = warn_before
        self._walltime = WalltimeMonitor(warn_before, self._walltime_ends)
        self._renewed: dict[int, int] = {}  # hosts that wait in the places of others, by these
        self._renewing = threading.Lock()  # a heal waits for hosts that are being asked for
        self._id = ""
        self._workers: dict[str, int] = {}  # the numbers of hosts that were attached, by the ids of their workers
        self._urls: dict[int, str] = {}  # where they were attached to

    # -- as any job ---------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._requested:
            raise ValueError(f"this {type(self).__name__} has no mesh: add_mesh() before")
        if self._id:
            self._end()  # the rest of the job, if some hosts have gone
        self._id = secrets.token_hex(8)
        numbers = iter(range(sum(self._requested.values())))
        record = JobRecord(
            job=self._id,
            kind=type(self).__name__,
            launcher=self._launcher.name,
            options=self._launcher.options(),
            request=self._request_fields(),
            meshes={name: [next(numbers) for _ in range(count)] for name, count in self._requested.items()},
            created=time.time(),
            creator=f"{socket.gethostname()} {os.getpid()}",
            holder=registry.this_process(),
            folder=os.getcwd(),
        )
        key = None
        if self._launcher.needs_key:
            key = new_key_text(f"job-{self._id}") if self._key_file is None else key_text(self._key_file)
        registry.add(record, key, self._env)
        try:
            with registry.changing(self._id) as kept:
                each = [(name, f"{name}{at}") for name, count in self._requested.items() for at in range(count)]
                meshes, names = zip(*each)
                kept.ticket = self._submit(self._request(names, meshes))
        except BaseException:
            self._forget()
            raise

    def _submit(self, request: LaunchRequest) -> Ticket:
        return self._launcher.submit(request)

    def _hosts(self) -> dict[str, HostMesh]:
        try:
            record = self._record()
            numbers = {number for each in record.meshes.values() for number in each}
            status = self._wait_for(numbers, None, self._hold)
        except BaseException:
            if not self.keep_partial:
                self.kill()
            raise
        with registry.changing(self._id) as record:
            record.holder = registry.this_process()
        return {name: self._attach(name, numbers, status) for name, numbers in record.meshes.items()}

    def _end(self) -> None:
        self._walltime.close()
        self._walltime = WalltimeMonitor(self._warn_before, self._walltime_ends)
        self._renewed.clear()
        record = registry.read(self._id) if self._id else None
        if record is not None and record.ticket is not None:
            self._release(range(record.ticket.hosts))
            self._launcher.end(record.ticket)
        self._launcher.close()
        self._workers.clear()
        self._forget()

    def _release(self, numbers: Iterable[int]) -> None:
        """End what this process runs on these hosts, and their workers, in good order, so that it is no failure."""
        numbers = list(numbers)
        self._walltime.drop(numbers)
        urls = [url for number in numbers if (url := self._urls.pop(number, "")) and number in self._workers.values()]
        key_file = self._job_key()
        # One that has ended refuses at once, while an attachment is tried for as long as it may take.
        living = each_at_once(_AT_ONCE, lambda url: url.startswith("ipc:") or reaches(url, _DIAL_TIME), urls, "release")
        urls = [url for url, lives in zip(urls, living) if lives]
        try:
            self._shut_down(urls, key_file)
        except ConnectionError:
            for url in urls:  # some are gone, and the others are shut down one by one
                try:
                    self._shut_down([url], key_file)
                except ConnectionError as e:
                    log.debug("%s was not shut down in good order: %s", url, e)

    def _shut_down(self, urls: list[str], key_file: str | None) -> None:
        if urls:
            hosts = attach_to_workers(workers=urls, key_file=key_file, timeout=_RELEASE_TIME)
            try:
                hosts.shutdown().get(_RELEASE_TIME)
            except TimeoutError as e:
                log.debug("%s was not shut down in time: %s", hosts, e)

    def _forget(self) -> None:
        job, self._id = self._id, ""
        if job:
            registry.remove(job)

    def _is_alive(self) -> bool:
        record = registry.read(self._id) if self._id else None
        if record is None or record.ticket is None:
            return False
        members = {number for numbers in record.meshes.values() for number in numbers}
        status = self._launcher.poll(record.ticket)
        return all(host.state is not HostPhase.GONE for host in status.hosts if host.host in members)

    def _adopt(self, known: Job) -> None:
        assert isinstance(known, EngineJob)
        self._id, self.apply_id = known._id, known.apply_id

    def _check_new(self, what: str) -> None:
        if self.apply_id is not None:
            raise RuntimeError(f"{what}() comes too late: this job was applied; kill() it first")

    def _spec(self) -> Any:
        return (self._launcher.name, self._launcher.options(), self._request_fields(), self._env)

    def _fields(self) -> dict[str, Any]:
        return {
            "job": self._id,
            "launcher": self._launcher.name,
            "options": self._launcher.options(),
            "request": self._request_fields(),
        }

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> EngineJob:
        found = msgspec.convert(fields, _Fields)
        try:
            launcher = launcher_class(found.launcher).of(found.options)
        except (LaunchError, TypeError) as e:
            raise ValueError(str(e)) from e
        return cls._rebuilt(launcher, found.request, found.job)

    @classmethod
    def _rebuilt(cls, launcher: Launcher, request: _RequestFields, job: str) -> EngineJob:
        """A job that an earlier program has applied; subclasses are made without their own arguments."""
        made = cls.__new__(cls)
        EngineJob.__init__(
            made,
            launcher,
            request.meshes,
            resources=request.resources,
            python=request.python,
            idle=request.idle,
            name=request.name,
            key_file=request.key_file or None,
        )
        if job and registry.read(job) is not None:
            made._id = job
            made._env = registry.env_of(job)
        return made

    # -- what only these jobs have --------------------------------------------------------------------

    @property
    def job_id(self) -> str:
        """Identifies the job in the list of all jobs; "" if it is not applied."""
        return self._id

    @property
    def meshes(self) -> dict[str, int]:
        """The number of hosts of each mesh; of a job that is not applied, as it asks for them."""
        record = registry.read(self._id) if self._id else None
        if record is None:
            return dict(self._requested)
        return {name: len(numbers) for name, numbers in record.meshes.items()}

    @property
    def resources(self) -> Resources:
        """What each host must have, unless its mesh asks for something else."""
        return self._resources

    @property
    def engine(self) -> str:
        """The name of its launcher."""
        return self._launcher.name

    @classmethod
    def find(cls, job: str) -> EngineJob:
        """A job in the list of all jobs, by its id, whatever program has applied it.

        Raises:
            LaunchError: it is not in the list, or its launcher is not installed here.
        """
        record = registry.read(job)
        if record is None:
            known = ", ".join(each.job for each in registry.records()) or "none"
            raise LaunchError(f"there is no job {job} of yours (there are: {known})")
        launcher = launcher_class(record.launcher).of(record.options)
        kind = Job._kinds.get(record.kind)
        made = kind if kind is not None and issubclass(kind, EngineJob) else EngineJob
        found = made._rebuilt(launcher, msgspec.convert(record.request, _RequestFields), job)
        found.apply_id = job
        return found

    def attached(self, *, keep: bool = False) -> JobState:
        """Wait for the hosts of the job as it was applied, and attach to them; as ``state``, but nothing is asked anew.

        Args:
            keep: do not end the job if that fails.

        Raises:
            LaunchError: it is not applied, a host has gone, or not all are up in time.
        """
        self.keep_partial = self.keep_partial or keep
        return JobState(self._mounts.make(self._hosts()))

    def status(self) -> JobStatus:
        """Where each host of the job is, from the engine. Hosts that were replaced or given back are left out."""
        record = self._record()
        assert record.ticket is not None
        members = {number for numbers in record.meshes.values() for number in numbers}
        found = self._launcher.poll(record.ticket)
        return JobStatus(tuple(host for host in found.hosts if host.host in members))

    def wait(self, timeout: float | None = None) -> JobStatus:
        """Wait until all hosts are up.

        Args:
            timeout: a limit (seconds); by default that of the job.

        Raises:
            StartFailedError: a worker could not start.
            StartTimeoutError: not all were up in time; hosts stay as they are.
            LaunchError: the job was ended meanwhile.
        """
        record = self._record()
        return self._wait_for({number for each in record.meshes.values() for number in each}, timeout)

    def log(self, host: int | None = None, lines: int = 100) -> str:
        """The last output of the workers: of one host by its number, or of all, each under its name.

        Raises:
            LaunchError: the job is not applied, or has no such host.
        """
        record = self._record()
        assert record.ticket is not None
        if host is not None:
            return host_log(self._launcher, record.ticket, host, lines)
        names = {each.host: each.name for each in self.status().hosts}
        texts = {number: self._launcher.log(record.ticket, number, lines) for number in sorted(names)}
        return "\n".join(f"== host {n} {names[n]}".rstrip() + f" ==\n{text.strip()}" for n, text in texts.items())

    def resize(self, hosts: int, mesh: str | None = None) -> HostMesh:
        """Ask the provider for more hosts of a mesh, or give back its last ones and end their processes.

        Proc meshes keep their size: spawn again on the mesh that this returns. What runs on hosts that stay goes on.

        Args:
            hosts: how many the mesh is to have.
            mesh: its name; by default the only one.

        Raises:
            LaunchError: the engine refuses, or the new hosts are not up in time; they are then given back.
            ValueError: there is no such mesh, or the number is not positive.
        """
        record = self._record()
        name = self._mesh_named(mesh, record)
        if isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1:
            raise ValueError(
                f"{name} cannot have {hosts!r} hosts: give a whole number of at least 1, or kill() the job"
            )
        numbers = record.meshes[name]
        if hosts > len(numbers):
            new = self._more([(name, f"{name}{at}") for at in range(len(numbers), hosts)], None)
            with registry.changing(self._id) as kept:
                kept.meshes[name] = [*kept.meshes[name], *new]
        elif hosts < len(numbers):
            with registry.changing(self._id) as kept:
                ending, kept.meshes[name] = kept.meshes[name][hosts:], kept.meshes[name][:hosts]
                ticket = kept.ticket
            assert ticket is not None
            self._release(ending)
            self._launcher.end(ticket, ending)
        return self._attach(name, self._record().meshes[name], self.wait())

    def replacements(self, gone: Sequence[str], timeout: float) -> HostMesh:
        """Get new hosts in the places of lost ones; ``heal`` and restart policies call this.

        Args:
            gone: the ids of the workers that are lost, as ``HostStatus.worker`` has them.
            timeout: how long their start may take (seconds).

        Returns:
            As many new hosts, attached, in the same order.

        Raises:
            LaunchError: the engine gives none, or one of these was no host of this job.
        """
        record = self._record()
        places = {number: name for name, numbers in record.meshes.items() for number in numbers}
        old = [self._workers.get(worker, -1) for worker in gone]
        if strange := [worker for worker, number in zip(gone, old) if number not in places]:
            raise LaunchError(f"{', '.join(strange)} is no host of {self!r}, so it has no replacement for it")
        with self._renewing:
            ready = {number: self._renewed.pop(number) for number in old if number in self._renewed}
        if ready:
            ticket = self._record().ticket
            assert ticket is not None
            up = {host.host for host in self._launcher.poll(ticket).of(HostPhase.UP)}
            ready = {number: new for number, new in ready.items() if new in up}
        missing = [number for number in old if number not in ready]
        if missing:
            ready.update(zip(missing, self._more([(at := places[n], f"{at}{n}") for n in missing], timeout)))
        new = [ready[number] for number in old]
        with registry.changing(self._id) as kept:
            for before, after in zip(old, new):
                members = kept.meshes[places[before]]
                members[members.index(before)] = after
                self._urls.pop(before, None)  # nothing is there any more to end in good order
        return self._attach("replacements", new, self._wait_for(set(new), timeout))

    # -- asking the engine ----------------------------------------------------------------------------

    def _record(self) -> JobRecord:
        record = registry.read(self._id) if self._id else None
        if record is None or record.ticket is None:
            raise LaunchError(f"this {type(self).__name__} is not applied, or was ended: call apply() or state()")
        return record

    def _mesh_named(self, mesh: str | None, record: JobRecord) -> str:
        names = list(record.meshes)
        if mesh is None and len(names) == 1:
            return names[0]
        if mesh not in names:
            raise ValueError(f"this job has no mesh {mesh!r}: name one of {', '.join(names)}")
        return mesh

    def _more(self, wanted: Sequence[tuple[str, str]], timeout: float | None) -> list[int]:
        """The numbers of further hosts, which are up. If they cannot be, they are given back.

        Args:
            wanted: their meshes, and what they may be called.
        """
        meshes, names = zip(*wanted)
        with registry.changing(self._id) as kept:
            assert kept.ticket is not None
            before = kept.ticket
            kept.ticket = self._launcher.more(before, len(names), self._request(names, meshes))
            new = list(range(before.hosts, kept.ticket.hosts))
        try:
            self._wait_for(set(new), timeout, self._hold)
        except BaseException:
            self._launcher.end(kept.ticket, new)
            raise
        return new

    def _wait_for(
        self, numbers: set[int], timeout: float | None, on_up: Callable[[Ticket, list[HostStatus]], None] | None = None
    ) -> JobStatus:
        limit = self.timeout if timeout is None else timeout
        end = time.monotonic() + limit
        pause = _FIRST_POLL
        shown = ""
        while True:
            ticket = self._record().ticket
            assert ticket is not None
            status = self._launcher.poll(ticket)
            status = JobStatus(tuple(host for host in status.hosts if host.host in numbers))
            if self.on_progress is not None and str(status) != shown:
                shown = str(status)
                self.on_progress(status)
            if gone := status.of(HostPhase.GONE):
                raise self._failure(ticket, gone[0])
            up = status.of(HostPhase.UP)
            if on_up is not None:
                on_up(ticket, up)
            if len(up) == len(numbers):
                return status
            if time.monotonic() > end:
                waiting = [host for host in status.hosts if host.state is not HostPhase.UP]
                logs = "\n".join(filter(None, (self._launcher.log(ticket, host.host, 5) for host in waiting[:3])))
                raise StartTimeoutError(len(up), len(numbers), limit, status.reason, logs)
            self._launcher.rest(min(pause, max(0.0, end - time.monotonic())))
            pause = min(pause * 1.3, _LAST_POLL)

    def _failure(self, ticket: Ticket, host: HostStatus) -> LaunchError:
        where = host.name or f"host {host.host}"
        said = self._launcher.log(ticket, host.host, _LOG_LINES)
        if host.failed:
            return StartFailedError(where, host.reason or "it gave no reason", host.exit_code, said)
        tail = f"\nThe end of its log:\n{said.strip()}" if said.strip() else ""
        return LaunchError(f"{where} is gone before it could be used: {host.reason or 'the engine ended it'}{tail}")

    def _request(self, names: tuple[str, ...], meshes: tuple[str, ...]) -> LaunchRequest:
        key = None
        if self._launcher.needs_key:
            key = Secret(key_text(registry.key_path(self._id)))
        command = WorkerCommand(self._id, key, self._env, self._python, self._idle)
        return LaunchRequest(len(names), command, self._resources, self._name, names, meshes)

    def _request_fields(self) -> dict[str, Any]:
        fields = _RequestFields(
            self._requested, self._resources, self._python, self._idle, self._name, self._key_file or ""
        )
        return msgspec.to_builtins(fields)

    # -- attaching --------------------------------------------------------------------------------------

    def _hold(self, ticket: Ticket, hosts: list[HostStatus]) -> None:
        """Attach to hosts as soon as they are up, so that none ends as idle while others are waited for."""
        new = [host for host in hosts if self._workers.get(host.worker) != host.host]
        if not new:
            return

        def route(host: HostStatus) -> str:
            return self._launcher.route(ticket, host)

        urls = each_at_once(_AT_ONCE, route, new, "monarch-route")
        attach_to_workers(workers=urls, name=self._name, key_file=self._job_key(), timeout=_ATTACH_TIME)
        self._workers.update({host.worker: host.host for host in new})
        self._urls.update({host.host: url for host, url in zip(new, urls)})
        self._walltime.add(new)

    def _attach(self, name: str, numbers: list[int], status: JobStatus) -> HostMesh:
        """A mesh of these hosts, which are up."""
        ticket = self._record().ticket
        assert ticket is not None
        self._hold(ticket, [host for host in status.hosts if host.host in numbers])
        urls = [self._urls[number] for number in numbers]
        return attach_to_workers(workers=urls, name=name, key_file=self._job_key(), timeout=_ATTACH_TIME)

    def _walltime_ends(self, hosts: tuple[HostStatus, ...]) -> None:
        """Warn of the end of the walltime of hosts; on the thread of ``WalltimeMonitor``."""
        renewed, reason = False, ""
        if self.renew:
            outcome: list[str] = []
            thread = threading.Thread(target=self._renew, args=(hosts, outcome), name="walltime-renewal", daemon=True)
            thread.start()
            thread.join(min(_RENEWAL, _RENEWAL_PART * self._warn_before))
            renewed = outcome == [""]
            reason = outcome[0] if outcome else "they are asked for, and are not up yet"
        ends_at = min(host.ends_at for host in hosts)
        handled = self.on_walltime is not None
        notice = WalltimeNotice(hosts, ends_at, renewed, reason, self._id, self.engine, handled)
        if not handled and not walltime.news:
            log.warning("%s", notice)
        walltime.news.notify(notice)
        if self.on_walltime is not None:
            self.on_walltime(notice)

    def _renew(self, hosts: tuple[HostStatus, ...], outcome: list[str]) -> None:
        """Ask for hosts in the places of these; the outcome is why there are none, or "" when they are up."""
        try:
            with self._renewing:
                meshes = self._record().meshes.items()
                places = {number: name for name, numbers in meshes for number in numbers}
                new = self._more([(places.get(host.host, ""), host.name) for host in hosts], None)
                self._renewed.update({host.host: number for host, number in zip(hosts, new)})
            outcome.append("")
        except (LaunchError, OSError) as e:
            outcome.append(str(e))

    def _job_key(self) -> str | None:
        return registry.key_path(self._id) if self._launcher.needs_key else None


class _RequestFields(msgspec.Struct):
    meshes: dict[str, int]
    resources: Resources
    python: str
    idle: float
    name: str
    key_file: str


class _Fields(msgspec.Struct):
    job: str
    launcher: str
    options: dict[str, Any]
    request: _RequestFields
