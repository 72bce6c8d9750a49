"""Hosts that are processes of this machine, and outlive the script that asked for them."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from typing import Any

from monarch_kernel.actor import HostMesh, attach_to_workers
from monarch_kernel.launchers.base import Job
from monarch_kernel.meshes import start_daemon

#: Seconds without a controller after which the hosts of a job end, if nothing else was said.
IDLE = 12 * 3600.0


class ProcessJob(Job):
    """Workers of this machine, each standing for a host.

    They stay when the script ends, and are found again by ``state()`` in the next one; what a script has started on
    them ends with it. They end by ``kill()``, and when no script has used them for longer than ``idle``.

    Args:
        meshes: how many hosts each mesh has, by its name.
        env: more environment variables for the hosts and all that runs on them.
        idle: seconds without a controller after which the hosts end; 0: never.
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
        self._remove()  # what is left of it, if some hosts have died
        folder = tempfile.mkdtemp(prefix=f"monarch-job-{os.getuid()}-", dir=_short_temporary_folder())
        self._folder = folder
        try:
            for name, at, path in self._places():
                start_daemon(
                    f"ipc://{path}",
                    os.path.join(folder, f"{name}{at}.log"),
                    name=f"{name}{at}",
                    idle=self._idle,
                    env=self._env,
                )
        except BaseException:
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
        living = [f"ipc://{path}" for _name, _at, path in self._places() if _listens(path)] if self._folder else []
        if living:
            attach_to_workers(workers=living, name="job").shutdown().get()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def _is_alive(self) -> bool:
        return bool(self._folder) and all(_listens(path) for _name, _at, path in self._places())

    def _spec(self) -> Any:
        return (self._meshes, self._env, self._idle)


def _short_temporary_folder() -> str:
    """The path of a socket has at most 107 bytes."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= 40 else "/tmp"


def _listens(path: str) -> bool:
    """Whether a process listens at this socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
        except OSError:
            return False
        return True
