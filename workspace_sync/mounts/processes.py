"""The processes of a mount: those on hosts, which end with this one, and the guardians on this machine."""

from __future__ import annotations

import subprocess
from typing import Any, NamedTuple

from monarch_kernel.errors import ActorError, SupervisionError
from monarch_kernel.introspection import ToolHost, spawn_tool
from workspace_sync.mounts.mounting import start_guardian

#: How long a host may take to mount or unmount, and the client to read its folder (seconds).
PATIENCE = 600.0


class MountedAt(NamedTuple):
    """A mount as its host describes it.

    Attributes:
        pid: of the process that serves it.
        path: the mount point, without links.
        source: its name in the mount table.
        near: whether the caller sees that process, and so can watch over it.
    """

    pid: int
    path: str
    source: str
    near: bool


class Processes:
    """What was started for one mount."""

    def __init__(self) -> None:
        self._tools: list[Any] = []
        self._guardians: list[subprocess.Popen[bytes]] = []

    def spawn(self, host: ToolHost, name: str, actor: Any, *arguments: Any) -> Any:
        """Start a process with one actor on a host."""
        procs = spawn_tool(host, name)
        self._tools.append(procs)
        return procs.spawn(name, actor, *arguments)

    def guard(self, mounted: MountedAt) -> None:
        """Have a mount on this machine unmounted as soon as its process ends, also by a kill.

        The process cannot see to that itself: when this process is killed, all that its host agent has started is, too.
        """
        if mounted.near:
            self._guardians.append(start_guardian(mounted.pid, mounted.path, mounted.source))

    def end(self) -> None:
        """End all of them."""
        for stopping in [tool.stop("the mount is closed") for tool in self._tools]:
            stopping.get(PATIENCE)
        for guardian in self._guardians:
            guardian.wait(PATIENCE)
        self._tools.clear()
        self._guardians.clear()


def why(error: Exception) -> str:
    """Why a call to one host failed, in a sentence."""
    if isinstance(error, SupervisionError):
        causes = [failure.death.cause for failure in error.failures if failure.death is not None]
        return causes[0] if causes else str(error)
    if isinstance(error, ActorError) and error.exception is not None:
        return str(error.exception)
    return str(error)
