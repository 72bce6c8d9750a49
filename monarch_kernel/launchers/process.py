"""Run hosts as processes of this machine, which outlive the program that requested them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_kernel import programs
from monarch_kernel.launchers.base import (
    MARKER,
    HostPhase,
    HostStatus,
    JobStatus,
    KeyWay,
    Launcher,
    LaunchRequest,
    StartFailedError,
    Ticket,
    WorkerAnnouncement,
    find_announcement,
    tail,
)
from monarch_kernel.launchers.engine_job import EngineJob
from monarch_kernel.private_files import PrivateFolder, listens
from monarch_kernel.workers import is_job_folder, make_job_folder, remove_job_folder

#: The default time without a controller after which the hosts of a job end (seconds).
IDLE = 12 * 3600.0
#: The time limit for a worker to end in good order (seconds).
_GRACE = 6.0
#: The time limit for reaping a command that has ended (seconds).
_REAPED = 5.0
#: The longest time for which a process that executes a program shows no environment (seconds).
_EXEC_TIME = 0.2


class ProcessLauncher(Launcher):
    """Starts workers on this machine. Each has a Unix socket in the folder of the job, and so needs no key."""

    name = "process"
    needs_key = False

    def __init__(self) -> None:
        #: The commands that this process has started, by the marks of their hosts.
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def submit(self, request: LaunchRequest) -> Ticket:
        """See ``Launcher``."""
        with make_job_folder() as folder:
            ticket = Ticket(
                launcher=self.name, job=request.command.job, hosts=request.hosts, data={"folder": folder.path}
            )
            try:
                self._start(folder, folder.lock_fd, request, range(request.hosts))
            except BaseException:
                folder.close()  # otherwise its lock would stay held
                self.end(ticket)
                raise
        return ticket

    def more(self, ticket: Ticket, count: int, request: LaunchRequest) -> Ticket:
        """See ``Launcher``."""
        new = range(ticket.hosts, ticket.hosts + count)
        more = Ticket(launcher=self.name, job=ticket.job, hosts=new.stop, data=ticket.data)
        with PrivateFolder.open(ticket.data["folder"]) as folder:
            # Living workers hold the lock. Each new one shares it, so that the end of the last one is noticed.
            lock = folder.open_file("lock", os.O_RDWR)
            try:
                self._start(folder, lock, request, new)
            except BaseException:
                self.end(more, new)
                raise
            finally:
                os.close(lock)
        return more

    def _start(self, folder: PrivateFolder, lock: int, request: LaunchRequest, hosts: Sequence[int]) -> None:
        command = request.command
        started: list[subprocess.Popen[bytes]] = []
        for at, host in enumerate(hosts):
            path = os.path.join(folder.path, f"host{host}")
            argv = command.argv(
                f"ipc://{path}.sock",
                key=KeyWay.NONE,
                announce=(f"{path}.json",),
                name=request.names[at] if request.names else f"host{host}",
                background=True,
                walltime=request.resources.walltime,
            )
            output = folder.open_file(f"host{host}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                process = programs.start(
                    [*argv, "--lock", str(lock)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(lock,),
                    start_new_session=True,
                    env={**os.environ, **command.env, **command.marks(host)},
                )
            except OSError as e:
                reason = f"{argv[0]} cannot be run: {e.strerror}"
                raise StartFailedError(f"host{host} (this machine)", reason) from e
            finally:
                os.close(output)
            started.append(process)
            self._started[command.marker(host)] = process
        # Each command ends once it has forked the worker, or has failed.
        threading.Thread(target=_reap, args=(started,), name="process-start", daemon=True).start()

    def poll(self, ticket: Ticket) -> JobStatus:
        """See ``Launcher``."""
        living: set[int] | None = None
        hosts: list[HostStatus] = []
        for host in range(ticket.hosts):
            path = os.path.join(ticket.data["folder"], f"host{host}")
            said = _announced(path + ".json")
            if said is not None and (said.error or listens(path + ".sock")):
                hosts.append(HostStatus.announced(host, said))
                continue
            # Try again if it is missing: a process that forks and ends while they are listed hides its child.
            for _ in range(3):
                if living is None or host not in living:
                    living = {number for _pid, number in _processes(ticket)}
            if said is None and host in (living or ()):
                hosts.append(HostStatus(host=host, state=HostPhase.STARTING, reason="its worker is starting"))
            elif said is None and (said := _announced(path + ".json")) is not None:
                hosts.append(HostStatus.announced(host, said))  # it has announced itself meanwhile
            elif said is None:
                last = (self.log(ticket, host, 1) or "it ended before it listened, and wrote no output").strip()
                code = _code(self._started.get(f"{ticket.job}.{host}"))
                gone = HostStatus(host=host, state=HostPhase.GONE, reason=last, exit_code=code, failed=True)
                hosts.append(gone)
            else:
                why = "its worker has ended"
                hosts.append(HostStatus(host=host, state=HostPhase.GONE, name=said.host, reason=why))
        return JobStatus(tuple(hosts))

    def log(self, ticket: Ticket, host: int, lines: int = 100) -> str:
        """See ``Launcher``."""
        return tail(os.path.join(ticket.data["folder"], f"host{host}.log"), lines)

    def end(self, ticket: Ticket, hosts: Sequence[int] | None = None) -> None:
        """See ``Launcher``."""
        ending = set(range(ticket.hosts) if hosts is None else hosts)
        told: set[int] = set()
        limit = time.monotonic() + _GRACE
        while left := [(pid, host) for pid, host in _processes(ticket) if host in ending]:
            late = time.monotonic() > limit
            for pid, host in left:
                said = _announced(os.path.join(ticket.data["folder"], f"host{host}.json"))
                number = signal.SIGKILL if late else signal.SIGTERM
                # For an end in good order, signal only the worker, which ends its ranks.
                if late or (pid not in told and (said is None or said.pid == pid)):
                    told.add(pid)
                    _kill(pid, number)
            time.sleep(0.01)
        if hosts is None:
            remove_job_folder(ticket.data["folder"])

    @classmethod
    def found(cls, *, own_process: bool) -> list[tuple[Launcher, Ticket]]:
        """See ``Launcher``. Processes have the mark of their job, and hold the lock of its folder."""
        jobs: dict[str, tuple[str, int]] = {}
        for pid, mark in _marked(b""):
            job, _, host = mark.rpartition(".")
            folder = _held_folder(pid)
            if job and host.isdigit() and folder:
                jobs[job] = folder, max(int(host) + 1, jobs.get(job, ("", 0))[1])
        return [
            (cls(), Ticket(launcher=cls.name, job=job, hosts=hosts, data={"folder": folder}))
            for job, (folder, hosts) in jobs.items()
        ]


class ProcessJob(EngineJob):
    """Workers on this machine, each of which acts as a host.

    They keep running when the script ends, and ``state()`` in the next script finds them again. Processes that a script
    started on them end with the script. The hosts end by ``kill()``, or after more than ``idle`` seconds without a
    script.

    Args:
        meshes: the number of hosts of each mesh, by its name.
        env: additional environment variables for the hosts and all processes on them.
        idle: the time without a controller after which the hosts end (seconds); 0: no limit.
    """

    def __init__(
        self, meshes: Mapping[str, int], env: Mapping[str, str] | None = None, *, idle: float = IDLE, **options: Any
    ) -> None:
        super().__init__(ProcessLauncher(), meshes, env=env, idle=idle, **options)

    def _start(self) -> None:
        super()._start()
        try:
            self.wait()  # there is no queue here, so the hosts are up when `apply` returns
        except BaseException:
            self._end()
            raise


def _reap(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        process.wait()


def _code(ended: subprocess.Popen[bytes] | None) -> int | None:
    """Return the exit code of a command that is no longer running; None if another program started it."""
    with contextlib.suppress(subprocess.TimeoutExpired):  # another thread is about to reap it
        return None if ended is None else ended.wait(_REAPED)
    return None


def _announced(path: str) -> WorkerAnnouncement | None:
    try:
        with open(path, "rb") as file:
            return find_announcement(file.read())
    except OSError:
        return None


def _processes(ticket: Ticket) -> list[tuple[int, int]]:
    """Return the living processes of a job on this machine, each with the number of its host."""
    marks = ((pid, mark.rpartition(".")[2]) for pid, mark in _marked(f"{ticket.job}.".encode()))
    return [(pid, int(host)) for pid, host in marks if host.isdigit()]


def _marked(begin: bytes) -> list[tuple[int, str]]:
    """Return the living processes of this machine whose mark begins with ``begin``, each with its mark."""
    found: list[tuple[int, str]] = []
    mark = MARKER.encode() + b"="
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            for item in _environment(entry):
                if item.startswith(mark + begin):
                    found.append((int(entry), item.removeprefix(mark).decode(errors="replace")))
    return found


def _held_folder(pid: int) -> str:
    """Return the folder of a job whose lock a process holds; "" if it holds none."""
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                folder, name = os.path.split(os.readlink(f"/proc/{pid}/fd/{fd}"))
                if name == "lock" and is_job_folder(folder):
                    return folder
    except OSError:  # it has ended, or belongs to another user
        pass
    return ""


def _environment(pid: str) -> list[bytes]:
    """Return the environment of a process; empty if it belongs to another user."""
    end = time.monotonic() + _EXEC_TIME
    try:
        while True:
            with open(f"/proc/{pid}/environ", "rb") as file:
                found = file.read()
            if found or time.monotonic() > end:
                return found.split(b"\0")
            os.readlink(f"/proc/{pid}/exe")  # fails for zombies and kernel threads
            time.sleep(0.001)  # it is executing a program
    except OSError:
        return []


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
