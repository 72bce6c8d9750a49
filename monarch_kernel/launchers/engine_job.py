"""``EngineJob``: a job whose hosts come from a provider, through any ``Launcher``."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from monarch_kernel.actor import HostMesh, attach_to_workers
from monarch_kernel.launchers import registry, walltime
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

# Run a blocking function for several hosts at once.

S = TypeVar("S")
T = TypeVar("T")


def each_at_once(most: int, work: Callable[[S], T], items: Iterable[S], name: str) -> list[T]:
    """Call a function for each item, several in parallel, and return the results in order.

    Waits for all calls, even if one fails.

    Args:
        name: the name of the threads.
    """
    found = list(items)
    if len(found) < 2:
        return [work(item) for item in found]
    with concurrent.futures.ThreadPoolExecutor(min(most, len(found)), name) as pool:
        return list(pool.map(work, found))


log = logging.getLogger(__name__)

#: Time without a controller after which the workers of a job end (seconds).
IDLE = 600.0
#: How long to wait for hosts (seconds).
TIMEOUT = 600.0
#: How long before the end of a walltime to warn (seconds).
WARN_BEFORE = 300.0
#: The time that a warning waits for replacement hosts (seconds), and the maximum share of ``warn_before`` for it.
_RENEWAL, _RENEWAL_PART = 30.0, 0.5
#: How many addresses are tried in parallel.
_AT_ONCE = 16
#: The first and the longest interval between polls of a provider while hosts start (seconds).
_FIRST_POLL, _LAST_POLL = 0.05, 2.0
_LOG_LINES = 20
#: The time limit for a host that is up to answer (seconds).
_ATTACH_TIME = 30.0
#: The time limit for a host to end in good order (seconds).
_RELEASE_TIME = 5.0
#: The time limit for the port of a host that is to be ended to answer (seconds).
_DIAL_TIME = 1.0


class EngineJob(Job):
    """A job whose hosts come from a provider.

    ``apply`` sends the request, and returns when the provider has accepted it. ``state`` waits for the hosts, and
    attaches to them. A later program finds the job by the file of ``state``, or in the list of all jobs. Its workers
    end after ``idle`` seconds without a controller, in any case.

    Args:
        launcher: sends requests to the provider.
        meshes: the number of hosts of each mesh, by its name.
        resources: the requirements of each host.
        env: environment variables for the workers and all processes on them. They are sent as secrets are.
        python: the interpreter on the hosts; by default the path of this process's interpreter.
        idle: the time without a controller after which workers end (seconds).
        timeout: the time that ``state`` waits for hosts (seconds).
        name: the name for the job at the provider.
        key_file: the key of its workers; by default each job has a separate key. Ranks of two jobs can send messages to
            each other only if their workers trust each other's key.
        keep_partial: whether hosts that are up stay if others do not start in time.
        on_progress: called with the status whenever it has changed while ``state`` waits.
        on_walltime: called before the walltime of hosts ends, on a separate thread, to save work. By default a notebook
            shows the notice, and any other program logs it.
        warn_before: the time of the call before that end (seconds).
        renew: whether replacement hosts are requested then. They replace these hosts when a mesh heals that was spawned
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
        self._renewed: dict[int, int] = {}  # by old host: the host that waits to replace it
        self._renewing = threading.Lock()  # a heal waits until requested hosts have come up
        self._id = ""
        self._workers: dict[str, int] = {}  # by worker id: the number of an attached host
        self._urls: dict[int, str] = {}  # by host: the URL that it was attached at

    # -- as any job ---------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._requested:
            raise ValueError(f"this {type(self).__name__} has no mesh: add_mesh() before")
        if self._id:
            self._end()  # end the rest of the job if some hosts are gone
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
        """End the processes of these hosts, and their workers, in good order, so that this is not a failure."""
        numbers = list(numbers)
        self._walltime.drop(numbers)
        urls = [url for number in numbers if (url := self._urls.pop(number, "")) and number in self._workers.values()]
        key_file = self._job_key()
        # A host that has ended refuses the connection at once, while attaching to it would take until the timeout.
        living = each_at_once(_AT_ONCE, lambda url: url.startswith("ipc:") or reaches(url, _DIAL_TIME), urls, "release")
        urls = [url for url, lives in zip(urls, living) if lives]
        try:
            self._shut_down(urls, key_file)
        except ConnectionError:
            for url in urls:  # some are gone: shut the others down one by one
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

    def _fields(self) -> dict[str, object]:
        return {
            "job": self._id,
            "launcher": self._launcher.name,
            "options": self._launcher.options(),
            "request": self._request_fields(),
        }

    @classmethod
    def _of(cls, fields: dict[str, object]) -> EngineJob:
        found = msgspec.convert(fields, _Fields)
        try:
            launcher = launcher_class(found.launcher).of(found.options)
        except (LaunchError, TypeError) as e:
            raise ValueError(str(e)) from e
        return cls._rebuilt(launcher, found.request, found.job)

    @classmethod
    def _rebuilt(cls, launcher: Launcher, request: _RequestFields, job: str) -> EngineJob:
        """Recreate a job that an earlier program has applied. Subclasses are created without their own arguments."""
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
        """The id of the job in the list of all jobs; "" if it is not applied."""
        return self._id

    @property
    def meshes(self) -> dict[str, int]:
        """The number of hosts of each mesh; for a job that is not applied, the requested number."""
        record = registry.read(self._id) if self._id else None
        if record is None:
            return dict(self._requested)
        return {name: len(numbers) for name, numbers in record.meshes.items()}

    @property
    def resources(self) -> Resources:
        """The requirements of each host, unless its mesh has others."""
        return self._resources

    @property
    def engine(self) -> str:
        """The name of its launcher."""
        return self._launcher.name

    @classmethod
    def find(cls, job: str) -> EngineJob:
        """Find a job in the list of all jobs by its id, whatever program applied it.

        Raises:
            LaunchError: the job is not in the list, or its launcher is not installed here.
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
        """Wait for the hosts of the job as it was applied, and attach to them. Unlike ``state``, request nothing new.

        Args:
            keep: do not end the job if that fails.

        Raises:
            LaunchError: the job is not applied, a host is gone, or not all are up in time.
        """
        self.keep_partial = self.keep_partial or keep
        return JobState(self._mounts.make(self._hosts()))

    def status(self) -> JobStatus:
        """Query the status of each host of the job. Hosts that were replaced or released are left out."""
        record = self._record()
        assert record.ticket is not None
        members = {number for numbers in record.meshes.values() for number in numbers}
        found = self._launcher.poll(record.ticket)
        return JobStatus(tuple(host for host in found.hosts if host.host in members))

    def wait(self, timeout: float | None = None) -> JobStatus:
        """Wait until all hosts are up.

        Args:
            timeout: the time limit (seconds); by default that of the job.

        Raises:
            StartFailedError: a worker could not start.
            StartTimeoutError: not all were up in time; hosts keep their state.
            LaunchError: the job was ended meanwhile.
        """
        record = self._record()
        return self._wait_for({number for each in record.meshes.values() for number in each}, timeout)

    def log(self, host: int | None = None, lines: int = 100) -> str:
        """Return the last output of the workers: of one host by its number, or of all, each under its name.

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
        """Request more hosts for a mesh, or release its last ones and end their processes.

        Proc meshes keep their size: spawn again on the mesh that this returns. Work on remaining hosts continues.

        Args:
            hosts: the new number of hosts of the mesh.
            mesh: its name; by default the only one.

        Raises:
            LaunchError: the provider rejects the request, or the new hosts are not up in time; they are then released.
            ValueError: the mesh does not exist, or the number is not positive.
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
        """Get new hosts in place of lost ones. ``heal`` and restart policies call this.

        Args:
            gone: the ids of the lost workers, as in ``HostStatus.worker``.
            timeout: the time limit for their start (seconds).

        Returns:
            The same number of new hosts, attached, in the same order.

        Raises:
            LaunchError: the provider grants none, or one of the lost workers did not belong to this job.
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
                self._urls.pop(before, None)  # no process is left there that could be ended in good order
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
        """Request further hosts, wait until they are up, and return their numbers. If that fails, release them.

        Args:
            wanted: their meshes and suggested names.
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

    def _request_fields(self) -> dict[str, object]:
        fields = _RequestFields(
            self._requested, self._resources, self._python, self._idle, self._name, self._key_file or ""
        )
        return msgspec.to_builtins(fields)

    # -- attaching --------------------------------------------------------------------------------------

    def _hold(self, ticket: Ticket, hosts: list[HostStatus]) -> None:
        """Attach to hosts as soon as they are up, so that none ends as idle during the wait for others."""
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
        """Return a mesh of these hosts, which are up."""
        ticket = self._record().ticket
        assert ticket is not None
        self._hold(ticket, [host for host in status.hosts if host.host in numbers])
        urls = [self._urls[number] for number in numbers]
        return attach_to_workers(workers=urls, name=name, key_file=self._job_key(), timeout=_ATTACH_TIME)

    def _walltime_ends(self, hosts: tuple[HostStatus, ...]) -> None:
        """Warn of the end of the walltime of hosts. Runs on the thread of ``WalltimeMonitor``."""
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
        """Request hosts in place of these. The outcome is the reason why there are none, or "" when they are up."""
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
    options: dict[str, object]
    request: _RequestFields
