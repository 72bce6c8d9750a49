"""What all jobs have in common: applied once, found again through a file, ended on request."""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from monarch_kernel.actor import HostMesh
from monarch_kernel.private_files import read_own_file, write_own_file

#: Where ``Job.state`` looks for a job that was applied before.
CACHED_PATH = ".monarch/job_state.json"
#: How the files of jobs begin, and the version of what follows. A job of another version is applied anew.
FORMAT = "monarch_kernel job"
VERSION = 1

Path = str | os.PathLike[str]


class JobFile(msgspec.Struct):
    """What is in the file of a job: plain data, as JSON.

    Attributes:
        kind: the name of its class.
        fields: what that class says of it.
    """

    format: str
    version: int
    kind: str
    apply_id: str | None
    fields: dict[str, Any]


class _OtherJobError(ValueError):
    """This is a job's file, but of a version or kind that is not known here."""


class JobState:
    """The hosts of an applied job: each of its meshes is an attribute."""

    def __init__(self, meshes: dict[str, HostMesh]) -> None:
        self._meshes = meshes

    def __getattr__(self, name: str) -> HostMesh:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._meshes[name]
        except KeyError:
            known = ", ".join(self._meshes) or "none"
            raise AttributeError(f"this job has no mesh {name!r} (its meshes: {known})") from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._meshes]

    def __repr__(self) -> str:
        return f"<JobState {', '.join(f'{name}={len(mesh)}' for name, mesh in self._meshes.items())}>"


class Job(ABC):
    """Hosts that are asked for by name.

    Attributes:
        apply_id: of the last ``apply``; None before.
    """

    _kinds: ClassVar[dict[str, type[Job]]] = {}

    def __init_subclass__(cls) -> None:
        Job._kinds[cls.__name__] = cls

    def __init__(self) -> None:
        self.apply_id: str | None = None

    # -- what a job is -----------------------------------------------------------------------------

    @abstractmethod
    def _start(self) -> None:
        """Get the hosts."""

    @abstractmethod
    def _hosts(self) -> dict[str, HostMesh]:
        """The hosts, connected to."""

    @abstractmethod
    def _end(self) -> None:
        """Give the hosts back."""

    @abstractmethod
    def _is_alive(self) -> bool:
        """Whether all hosts are still there."""

    @abstractmethod
    def _spec(self) -> Any:
        """What was asked for: two jobs that ask for equal things can stand for each other."""

    @abstractmethod
    def _fields(self) -> dict[str, Any]:
        """The job as plain data: what JSON can say."""

    @classmethod
    @abstractmethod
    def _of(cls, fields: dict[str, Any]) -> Job:
        """A job from what ``_fields`` gave.

        Raises:
            ValueError: these cannot be fields of such a job.
        """

    # -- what programs call --------------------------------------------------------------------------

    def apply(self, client_script: str | None = None) -> None:
        """Get the hosts, unless they are there already.

        Args:
            client_script: not supported by these jobs, which run beside their client.

        Raises:
            ValueError: a script was given.
            RuntimeError: a host could not be started.
        """
        if client_script is not None:
            raise ValueError(
                f"{type(self).__name__} has no batch mode: run {client_script} yourself, and call state() in it"
            )
        if self.active:
            return
        self._start()
        self.apply_id = secrets.token_hex(8)

    def state(self, cached_path: Path | None = CACHED_PATH) -> JobState:
        """The hosts: those of an equal job that was applied before and still lives, or new ones.

        Args:
            cached_path: where the job is remembered from one run of a script to the next; None: it is not.

        Raises:
            PermissionError: another user has written that file, or could have.
            ValueError: that file is not a job's; it stays.
        """
        if not self.active:
            known = _load_cached(cached_path)
            if known is not None and type(known) is type(self) and known._spec() == self._spec() and known.active:
                vars(self).update(vars(known))
            else:
                self.apply()
        if cached_path is not None:
            self.dump(cached_path)
        return JobState(self._hosts())

    def kill(self) -> None:
        """Give the hosts back, and end all that runs on them."""
        if self.apply_id is not None:
            self._end()
            self.apply_id = None

    @property
    def active(self) -> bool:
        """Whether it was applied, and its hosts are there."""
        return self.apply_id is not None and self._is_alive()

    def dumps(self) -> bytes:
        """The job as bytes (JSON), for ``job_loads``."""
        found = JobFile(FORMAT, VERSION, type(self).__name__, self.apply_id, self._fields())
        return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"

    def dump(self, filename: Path) -> None:
        """Write the job to a file that only this user can read, for ``job_load``.

        Raises:
            ValueError: there is a file of that name that is not a job's; it stays.
        """
        path = os.path.abspath(filename)
        if os.path.exists(path):
            _read(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_own_file(path, self.dumps())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'active' if self.active else 'not active'}>"


def job_loads(data: bytes) -> Job:
    """A job from what ``Job.dumps`` gave.

    Raises:
        ValueError: it is no job.
    """
    return _job(_decode(data, "this"))


def job_load(filename: Path) -> Job:
    """A job from the file that ``Job.dump`` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: another user has written it, or could have.
        ValueError: it is no job.
    """
    return _job(_read(os.path.abspath(filename)))


def _read(path: str) -> JobFile:
    return _decode(read_own_file(path), path)


def _decode(data: bytes, where: str) -> JobFile:
    try:
        found = msgspec.json.decode(data, type=JobFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        found, why = None, str(e)
    else:
        why = f"its format is {found.format!r}"
    if found is None or found.format != FORMAT:
        raise ValueError(f"{where} is no job's state ({why}), so it is left alone: name another file, or move it away")
    return found


def _job(found: JobFile) -> Job:
    kind = Job._kinds.get(found.kind)
    if found.version != VERSION:
        raise _OtherJobError(f"this job was written in version {found.version}, and this is version {VERSION}")
    if kind is None:
        known = ", ".join(sorted(Job._kinds))
        raise _OtherJobError(f"this job is a {found.kind}, which is not known here (known: {known}): import it first")
    try:
        job = kind._of(found.fields)
    except (msgspec.ValidationError, TypeError, ValueError) as e:
        raise ValueError(f"this {found.kind} cannot be read: {e}") from e
    job.apply_id = found.apply_id
    return job


def _load_cached(path: Path | None) -> Job | None:
    if path is None:
        return None
    try:
        return job_load(path)
    except (FileNotFoundError, _OtherJobError):  # a new one takes its place
        return None
