"""``JobTrait``: jobs whose hosts a program finds itself, written for Monarch."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from typing import Any, Self

import msgspec

from monarch_kernel.actor import HostMesh
from monarch_kernel.launchers.job import Job, JobState

#: Attributes that every job has, and that no file of a job needs.
_OF_ALL = ("apply_id", "_mounts", "_services")


class JobTrait(Job):
    """The base class for your own jobs, with the methods that Monarch's jobs implement.

    Every job of this package is an instance, too. The next program finds a job through the file of ``state``, which is
    JSON and not a pickle. The attributes of the job must therefore be plain data, or call ``state(cached_path=None)``.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return Job in other.__mro__ if cls is JobTrait else NotImplemented

    @abstractmethod
    def _create(self, client_script: str | None) -> None:
        """Acquire the hosts, or let a script run there as the client. Called by ``apply`` if the job is not active."""

    @abstractmethod
    def can_run(self, spec: Job) -> bool:
        """Return whether this job, which an earlier program applied, has its hosts and satisfies the given one."""

    @abstractmethod
    def _state(self) -> JobState:
        """Return the hosts, attached. Called by ``state`` of an active job."""

    @abstractmethod
    def _kill(self) -> None:
        """Release the hosts. Called by ``kill`` of a job that was applied."""

    # -- as any job ---------------------------------------------------------------------------------

    def apply(self, client_script: str | None = None) -> None:
        """Acquire the hosts. Does nothing if the job is active. See ``_create`` for the script."""
        if client_script is None:
            super().apply()
        elif not self.active:
            self._create(client_script)
            self.apply_id = secrets.token_hex(8)

    def _start(self) -> None:
        self._create(None)

    def _hosts(self) -> dict[str, HostMesh]:
        return self._state()._hosts

    def _end(self) -> None:
        self._kill()

    def _is_alive(self) -> bool:
        return True  # as far as this program knows; for a job found through its file, can_run decides

    def _spec(self) -> Any:
        return None  # can_run compares arbitrary attributes

    def _fields(self) -> dict[str, Any]:
        found = {name: value for name, value in vars(self).items() if name not in _OF_ALL}
        for name, value in found.items():
            try:
                plain = msgspec.json.decode(msgspec.json.encode(value)) == value
            except (TypeError, ValueError):
                plain = False
            if not plain:
                kind = type(self).__name__
                raise ValueError(
                    f"a {kind} cannot be kept in a file of JSON, as its {name} is {value!r}: keep numbers, text, lists "
                    "and dictionaries of text there, or call state(cached_path=None)"
                )
        return found

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> Self:
        made = cls.__new__(cls)
        Job.__init__(made)
        vars(made).update(fields)
        return made
