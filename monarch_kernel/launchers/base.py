"""What all jobs have in common: applied once, found again through a file, ended on request."""

from __future__ import annotations

import os
import pickle
import secrets
from abc import ABC, abstractmethod
from typing import Any

from monarch_kernel.actor import HostMesh

#: Where ``Job.state`` looks for a job that was applied before.
CACHED_PATH = ".monarch/job_state.pkl"

Path = str | os.PathLike[str]


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
            cached_path: where the job is remembered from one run of a script to the next; None: it is not. The file is
                a pickle: name none that others can write.
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
        """The job as bytes, for ``job_loads``."""
        return pickle.dumps(self)

    def dump(self, filename: Path) -> None:
        """Write the job to a file, for ``job_load``."""
        path = os.path.abspath(filename)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        new = f"{path}.{os.getpid()}"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(self.dumps())
        os.replace(new, path)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'active' if self.active else 'not active'}>"


def job_loads(data: bytes) -> Job:
    """A job from what ``Job.dumps`` gave.

    Raises:
        ValueError: it is no job.
    """
    try:
        job = pickle.loads(data)
    except Exception as e:
        raise ValueError(f"this is no job that can be read: {type(e).__name__}: {e}") from e
    if not isinstance(job, Job):
        raise ValueError(f"this is a {type(job).__name__}, not a job")
    return job


def job_load(filename: Path) -> Job:
    """A job from the file that ``Job.dump`` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no job.
    """
    with open(filename, "rb") as file:
        return job_loads(file.read())


def _load_cached(path: Path | None) -> Job | None:
    if path is None:
        return None
    try:
        return job_load(path)
    except (OSError, ValueError):  # none yet, or of another version: a new one takes its place
        return None
