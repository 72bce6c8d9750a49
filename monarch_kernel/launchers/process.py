"""A job whose hosts are processes of this machine, which outlive the script that requested them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from monarch_kernel.actor import HostMesh, attach_to_workers
from monarch_kernel.launchers.base import Job
from monarch_kernel.private_files import listens
from monarch_kernel.workers import make_job_folder, remove_job_folder, start_daemon

#: Default time without a controller after which the hosts of a job end (seconds).
IDLE = 12 * 3600.0


class ProcessJob(Job):
    """Workers on this machine, each of which acts as a host.

    They keep running when the script ends, and ``state()`` in the next script finds them again; the processes that a
    script started on them end with the script. ``kill()`` ends them, and so does a time without a script of more than
    ``idle``.

    Args:
        meshes: the number of hosts of each mesh, by its name.
        env: additional environment variables for the hosts and all processes on them.
        idle: seconds without a controller after which the hosts end; 0: no limit.
    """

    def __init__(self, meshes: Mapping[str, int], env: Mapping[str, str] | None = None, *, idle: float = IDLE) -> None:
        super().__init__()
        if not meshes:
            raise ValueError("ProcessJob needs at least one mesh, as in ProcessJob({'hosts': 2})")
        for name, count in meshes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"ProcessJob: {name!r} cannot name a mesh: use an identifier, such as 'hosts'")
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"ProcessJob: {name}={count!r} must be a whole number of at least 1")
        self._meshes = dict(meshes)
        self._env = dict(env or {})
        self._idle = idle
        self._folder = ""

    def _start(self) -> None:
        self._remove()  # the rest of the job, if some hosts have died
        with make_job_folder() as folder:
            self._folder = folder.path
            try:
                for name, at, path in self._places():
                    start_daemon(
                        folder,
                        os.path.basename(path),
                        f"{name}{at}.log",
                        name=f"{name}{at}",
                        idle=self._idle,
                        env=self._env,
                    )
            except BaseException:
                folder.close()  # otherwise its lock would stay held
                self._remove()
                raise

    def _places(self) -> list[tuple[str, int, str]]:
        """The mesh, the number and the socket of each host."""
        return [
            (name, at, os.path.join(self._folder, f"{name}{at}.sock"))
            for name, count in self._meshes.items()
            for at in range(count)
        ]

    def _hosts(self) -> dict[str, HostMesh]:
        urls: dict[str, list[str]] = {}
        for name, _at, path in self._places():
            urls.setdefault(name, []).append(f"ipc://{path}")
        return {name: attach_to_workers(workers=found, name=name) for name, found in urls.items()}

    def _end(self) -> None:
        self._remove()

    def _remove(self) -> None:
        living = [f"ipc://{path}" for _name, _at, path in self._places() if listens(path)] if self._folder else []
        if living:
            attach_to_workers(workers=living, name="job").shutdown().get()
        if self._folder:
            folder, self._folder = self._folder, ""
            remove_job_folder(folder)

    def _is_alive(self) -> bool:
        return bool(self._folder) and all(listens(path) for _name, _at, path in self._places())

    def _spec(self) -> Any:
        return (self._meshes, self._env, self._idle)

    def _fields(self) -> dict[str, Any]:
        return msgspec.to_builtins(_Fields(self._meshes, self._env, self._idle, self._folder))

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> ProcessJob:
        found = msgspec.convert(fields, _Fields)
        job = cls(found.meshes, found.env, idle=found.idle)
        job._folder = found.folder
        return job


class _Fields(msgspec.Struct):
    meshes: dict[str, int]
    env: dict[str, str]
    idle: float
    folder: str
