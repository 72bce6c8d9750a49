"""A job whose hosts are all this machine, to test a program that is written for several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_kernel.actor import HostMesh, this_host
from monarch_kernel.launchers.job import Job


class LocalJob(Job):
    """A job in which every mesh is ``this_host()``. All processes on it end with this process.

    Args:
        hosts: the names of the meshes.
    """

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__()
        if isinstance(hosts, str) or not hosts or not all(isinstance(name, str) and name for name in hosts):
            raise ValueError(f"LocalJob(hosts={hosts!r}): give a list of names, such as ['trainers', 'generators']")
        self._names = tuple(hosts)

    def _start(self) -> None:
        pass

    def _hosts(self) -> dict[str, HostMesh]:
        return dict.fromkeys(self._names, this_host())

    def _end(self) -> None:
        this_host().stop("the job was killed").get()

    def _is_alive(self) -> bool:
        return True

    def _spec(self) -> Any:
        return self._names

    def _fields(self) -> dict[str, Any]:
        return {"hosts": list(self._names)}

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> LocalJob:
        return cls(**fields)
