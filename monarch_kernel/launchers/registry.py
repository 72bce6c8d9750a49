"""Keep the list of all jobs of this user on this machine, so that a later program finds and can end them.

Each job has a folder of mode 0700 in ``~/.local/state/monarch_kernel/jobs`` (``XDG_STATE_HOME``): a record without
secrets, the job's key, and its environment variables, each of mode 0600. A job enters the list before the first request
to its provider, and leaves it when it has ended. A job whose program was killed at any moment is therefore in the list.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import re
import socket
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import msgspec

from monarch_kernel import environment
from monarch_kernel.launchers.base import LaunchError, Ticket
from monarch_kernel.private_files import NotPrivateError, PrivateFolder

VERSION = 1
#: The time limit for another process to change a record (seconds).
_CHANGE_TIME = 30.0
_WHAT = "engine job"
_RECORD, _KEY, _ENV = "job.json", "key", "env.json"
#: The numbers of the hosts with started workers, one per line, if a program of the user starts them.
_STARTED = "started"


class JobRecord(msgspec.Struct, kw_only=True):
    """The record of a job. It contains no secret.

    Attributes:
        job: its id, and the name of its folder.
        kind: the name of its class.
        launcher: the name of its launcher.
        options: the options from which ``launcher_class(launcher).of`` recreates that launcher.
        request: its request, by the fields of ``EngineJob``.
        ticket: its ticket; None during the first request to the provider.
        meshes: by the name of the mesh, the numbers of its hosts, in the order of the mesh.
        created: when it was created (Unix time).
        creator: the host and process that created it.
        folder: the working folder of that process.
        holder: the process that attached to it last, as ``this_process`` returns it.
    """

    job: str
    kind: str
    launcher: str
    options: dict[str, object]
    request: dict[str, object]
    ticket: Ticket | None = None
    meshes: dict[str, list[int]] = {}
    created: float = 0.0
    creator: str = ""
    folder: str = ""
    holder: str = ""
    version: int = VERSION


def this_user() -> str:
    """Return the user's name in a form for labels and names at providers.

    With it, users who share a login can distinguish their jobs.
    """
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in many images
        name = str(os.getuid())
    return re.sub("[^A-Za-z0-9]+", "-", name).strip("-")[:63] or "unnamed"


def this_process() -> str:
    """Identify this process: its host, its pid, and its start time from the operating system."""
    return f"{socket.gethostname()} {os.getpid()} {_began(os.getpid())}"


def lives(process: str) -> bool | None:
    """Return whether a process still runs, from the result of ``this_process`` there; None: it is on another host."""
    host, pid, began = [*process.split(), "", "", ""][:3]
    if host != socket.gethostname() or not pid.isdigit():
        return None
    return _began(int(pid)) == began


def _began(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return "-"


def jobs_folder() -> str:
    """Return the folder with the folders of all jobs of this user."""
    return os.path.join(environment.user_folder("state"), "jobs")


def key_path(job: str) -> str:
    """Return the path of the file with a job's key."""
    return os.path.join(jobs_folder(), job, _KEY)


def add(record: JobRecord, key: str | None, env: dict[str, str]) -> None:
    """Add a new job to the list.

    Args:
        key: the contents of its key file; None: its workers need no key.
        env: its environment variables, which may be secret.

    Raises:
        OSError: the folder cannot be created.
    """
    os.makedirs(jobs_folder(), 0o700, exist_ok=True)
    with PrivateFolder.make(os.path.join(jobs_folder(), record.job)) as folder:
        folder.claim(_WHAT)
        try:
            if key is not None:
                folder.replace(_KEY, key.encode())
            folder.replace(_ENV, msgspec.json.encode(env))
            folder.replace(_RECORD, _encoded(record))
        except BaseException:
            folder.remove(["*"])
            raise


def read(job: str) -> JobRecord | None:
    """Return the record of a job; None if it is not in the list.

    Raises:
        NotPrivateError: another user could have written it.
        LaunchError: the record is of another version.
    """
    try:
        with PrivateFolder.open(os.path.join(jobs_folder(), job)) as folder:
            return _decoded(folder.read(_RECORD), folder.path)
    except FileNotFoundError:
        return None


def env_of(job: str) -> dict[str, str]:
    """Return the environment variables of a job."""
    with PrivateFolder.open(os.path.join(jobs_folder(), job)) as folder:
        return msgspec.json.decode(folder.read(_ENV), type=dict[str, str])


def records() -> list[JobRecord]:
    """Return all jobs in the list, oldest first. Folders that do not belong to a job are left out."""
    found: list[JobRecord] = []
    try:
        names = os.listdir(jobs_folder())
    except FileNotFoundError:
        return []
    for name in names:
        try:
            record = read(name)
        except (NotPrivateError, NotADirectoryError, LaunchError):
            continue
        if record is not None:
            found.append(record)
    return sorted(found, key=lambda record: record.created)


def started(job: str) -> set[int]:
    """Return the hosts whose workers a program of this user, and not a provider, has started."""
    try:
        with PrivateFolder.open(os.path.join(jobs_folder(), job)) as folder:
            return {int(line) for line in folder.read(_STARTED).split()}
    except FileNotFoundError:
        return set()


class Starting:
    """Prevents other processes from starting workers of a job until ``close``, or the end of this process."""

    def __init__(self, job: str) -> None:
        with PrivateFolder.open(os.path.join(jobs_folder(), job)) as folder:
            self._file = folder.open_file(_STARTED, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def take(self) -> bool:
        """Return whether this process may start workers now; False: another process is doing so."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def done(self, hosts: Iterable[int]) -> None:
        """Record that the workers of these hosts were started, so that they are not started again."""
        os.write(self._file, b"".join(b"%d\n" % host for host in hosts))

    def close(self) -> None:
        """Allow other processes to start workers."""
        os.close(self._file)


@contextmanager
def changing(job: str) -> Generator[JobRecord]:
    """Change a record exclusively. It is written at the end of the block, also after an exception.

    Raises:
        LaunchError: the job is not in the list, or another process locks its record for too long.
    """
    with _locked(job) as folder:
        record = _decoded(folder.read(_RECORD), folder.path)
        try:
            yield record
        finally:
            folder.replace(_RECORD, _encoded(record))


def remove(job: str) -> None:
    """Remove an ended job from the list. Does nothing if it is not in the list."""
    try:
        with _locked(job) as folder:
            folder.remove([_RECORD, _KEY, _ENV, _STARTED])
    except FileNotFoundError:
        return


@contextmanager
def _locked(job: str) -> Generator[PrivateFolder]:
    with PrivateFolder.open(os.path.join(jobs_folder(), job)) as folder:
        end = time.monotonic() + _CHANGE_TIME
        while not folder.take(_WHAT):
            if time.monotonic() > end:
                raise LaunchError(f"another process has been changing {folder.path} for {_CHANGE_TIME:g} s: end it")
            time.sleep(0.01)
        yield folder


def _encoded(record: JobRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def _decoded(data: bytes, where: str) -> JobRecord:
    try:
        record = msgspec.json.decode(data, type=JobRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise LaunchError(f"{where} is not the record of a job: {e}") from e
    if record.version != VERSION:
        raise LaunchError(f"{where} is of version {record.version} of the list of jobs, and this is {VERSION}")
    return record
