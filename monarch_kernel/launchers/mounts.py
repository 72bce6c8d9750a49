"""The mounts of a job: declared on it, made on its hosts by ``state``, and gone after ``kill``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from monarch_kernel.actor import HostMesh

if TYPE_CHECKING:
    from monarch_kernel.remotemount import MountHandler


@dataclass(frozen=True)
class RemoteMount:
    """A folder of the client for hosts.

    Attributes:
        source: the folder.
        mntpoint: the mount point on the hosts; None: the path that it has at the client.
        meshes: by name; None: all.
        python_exe: in the folder: the interpreter of ranks; None: they keep theirs.
    """

    source: str
    mntpoint: str | None
    meshes: tuple[str, ...] | None
    python_exe: str | None

    @property
    def interpreter(self) -> str | None:
        """The path of the interpreter on hosts; None: ranks keep theirs."""
        if self.python_exe is None or not os.path.lexists(os.path.join(self.source, self.python_exe)):
            return None
        return os.path.join(self.mntpoint or self.source, self.python_exe)


@dataclass(frozen=True)
class GatheredMount:
    """Folders of hosts for the client.

    Attributes:
        remote: the folder on hosts.
        local: the mount point here.
        meshes: by name; None: all.
    """

    remote: str
    local: str
    meshes: tuple[str, ...] | None


@dataclass
class JobMounts:
    """What was declared, and what is open."""

    remote: list[RemoteMount] = field(default_factory=list[RemoteMount])
    gathered: list[GatheredMount] = field(default_factory=list[GatheredMount])
    _open: ExitStack = field(default_factory=ExitStack)
    _handles: dict[tuple[RemoteMount, str], MountHandler] = field(
        default_factory=dict["tuple[RemoteMount, str]", "MountHandler"]
    )
    _shown: set[tuple[GatheredMount, str]] = field(default_factory=set["tuple[GatheredMount, str]"])

    def make(self, hosts: Mapping[str, HostMesh]) -> dict[str, HostMesh]:
        """Make the mounts that are not there, and show the others as their folders are now.

        Returns:
            The hosts, with the interpreters of their mounts.

        Raises:
            MountError: a host cannot mount; what was mounted stays.
            ValueError: a mount is for a mesh that the job does not have.
        """
        from monarch_kernel.gather_mount import gather_mount
        from monarch_kernel.remotemount import remotemount

        made = dict(hosts)
        for mount in self.remote:
            for name in _chosen(mount.meshes, hosts):
                handle = self._handles.get((mount, name))
                if handle is not None:
                    handle.refresh()
                else:
                    handle = remotemount(hosts[name], mount.source, mount.mntpoint)
                    self._handles[mount, name] = self._open.enter_context(handle)
                if mount.interpreter is not None:
                    made[name] = made[name].with_python_executable(mount.interpreter)
        for shown in self.gathered:
            names = _chosen(shown.meshes, hosts)
            for name in names:
                if (shown, name) not in self._shown:
                    local = shown.local if len(names) == 1 else os.path.join(shown.local, name)
                    os.makedirs(os.path.dirname(os.path.abspath(local)), exist_ok=True)
                    self._open.enter_context(gather_mount(hosts[name], shown.remote, local))
                    self._shown.add((shown, name))
        return made

    def __reduce__(self) -> tuple[type[JobMounts], tuple[list[RemoteMount], list[GatheredMount]]]:
        return JobMounts, (self.remote, self.gathered)  # what is open belongs to this process

    def close(self) -> None:
        """Unmount everything."""
        self._handles.clear()
        self._shown.clear()
        self._open.close()


def _chosen(names: Sequence[str] | None, hosts: Mapping[str, HostMesh]) -> list[str]:
    unknown = [name for name in names or () if name not in hosts]
    if unknown:
        raise ValueError(f"this job has no mesh {unknown[0]!r} to mount on (its meshes: {', '.join(hosts) or 'none'})")
    return list(hosts) if names is None else list(names)
