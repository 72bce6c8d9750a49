"""``remotemount``: a folder of the client on all hosts of a mesh, read on demand."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from monarch_kernel.actor import Future, HostMesh, this_host
from monarch_kernel.errors import ActorError, SupervisionError
from monarch_kernel.introspection import ToolHost, each_host, spawn_tool
from workspace_sync.model.errors import MountError
from workspace_sync.mounts.host_mount import HostMount, MountedAt
from workspace_sync.mounts.mounting import is_folder, namespace, start_guardian
from workspace_sync.mounts.source import MountSource

#: How long a host may take to mount, and the client to read its folder (seconds).
_PATIENCE = 600.0


class MountHandler:
    """A folder of the client that is mounted on all hosts of a mesh, between ``open`` and ``close``.

    Also a context manager that does both. ``remotemount`` makes it.
    """

    def __init__(self, host_mesh: HostMesh, sourcepath: str, mntpoint: str | None = None) -> None:
        self._hosts = host_mesh
        self._path = os.path.abspath(os.path.expanduser(os.fspath(sourcepath)))
        self._mntpoint = self._path if mntpoint is None else os.fspath(mntpoint)
        self._opened: _Opened | None = None

    @property
    def sourcepath(self) -> str:
        """The folder of the client."""
        return self._path

    @property
    def mntpoint(self) -> str:
        """The mount point on every host."""
        return self._mntpoint

    def open(self, via_gateway: bool = False) -> MountHandler:
        """Mount the folder as it is now. Programs on the hosts may read it when this returns.

        Args:
            via_gateway: as in Monarch; changes nothing, as blocks always take the direct way if there is one.

        Raises:
            MountError: it is open already, the folder cannot be read, or a host cannot mount it; then none does.
        """
        if self._opened is not None:
            raise MountError(f"{self._path} is already mounted by this handle: refresh() shows what has changed")
        self._opened = _Opened(self._hosts, self._path, self._mntpoint)
        return self

    def refresh(self, sourcepath: str | None = None) -> None:
        """Show the folder as it is now; on all hosts, once all know what has changed.

        Files that are open keep their old content; where it was never read and is gone at the client, reading it is EIO.

        Args:
            sourcepath: another folder to show from now on.

        Raises:
            MountError: the handle is not open, the folder cannot be read (the mounts stay as they were), or hosts
                failed, which stay at the old content; the message names them.
        """
        path = self._path if sourcepath is None else os.path.abspath(os.path.expanduser(os.fspath(sourcepath)))
        if self._opened is None:
            raise MountError(f"{self._path} is not mounted: open() the handle first")
        self._opened.refresh(path)
        self._path = path

    def close(self) -> None:
        """Unmount on all hosts, also while programs use it. Does nothing if it is not open.

        Raises:
            MountError: hosts failed to unmount; the message names them.
        """
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def __enter__(self) -> MountHandler:
        if self._opened is None:
            self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._opened is not None else "not open"
        return f"<MountHandler of {self._path} at {self._mntpoint}, {state}>"


def remotemount(host_mesh: HostMesh, sourcepath: str, mntpoint: str | None = None) -> MountHandler:
    """Mount a folder of this machine on all hosts of a mesh, read-only and read on demand.

    ``open()`` reads the folder and mounts its names; the content of a file travels when it is first read, about once
    from here, and from host to host. Small files of code are fetched ahead.

    Args:
        host_mesh: the hosts.
        sourcepath: a folder of this machine.
        mntpoint: the mount point on the hosts, an empty folder or a path that does not exist; by default the path that
            the folder has here.

    Source: the names and semantics are those of ``monarch.remotemount``.
    """
    return MountHandler(host_mesh, sourcepath, mntpoint)


class _Opened:
    """The processes of one open mount."""

    def __init__(self, host_mesh: HostMesh, path: str, mntpoint: str) -> None:
        folder = is_folder(path)
        hosts = each_host(host_mesh)
        self._tools: list[Any] = []
        self._guardians: list[subprocess.Popen[bytes]] = []
        self.names = [host.name for host in hosts]
        self.mounts: list[Any] = []
        try:
            [here] = each_host(this_host())
            self.source = self._spawn(here, "mount-source", MountSource)
            edition = self.source.publish.call_one(path)
            self.mounts = [
                self._spawn(host, "mount", HostMount, rank, len(hosts), self.source) for rank, host in enumerate(hosts)
            ]
            found = _value(edition, f"the folder {path}")
            self._each("mount", [m.open.call_one(mntpoint, found, namespace(), folder) for m in self.mounts], self._guard)
        except BaseException:
            self.close(quietly=True)
            raise

    def refresh(self, path: str) -> None:
        is_folder(path)
        edition = _value(self.source.publish.call_one(path), f"the folder {path}")
        ready: list[int] = []
        failed = self._gather([m.prepare.call_one(edition) for m in self.mounts], lambda rank, _: ready.append(rank))
        failed |= self._gather([self.mounts[rank].switch.call_one() for rank in ready], None, ready)
        self._report("show the new content", failed)

    def close(self, quietly: bool = False) -> None:
        failed = self._gather([m.close.call_one() for m in self.mounts])
        for tool in self._tools:
            tool.stop().get(_PATIENCE)
        for guardian in self._guardians:
            guardian.wait(_PATIENCE)
        if not quietly:
            self._report("unmount", failed)

    def _spawn(self, host: ToolHost, name: str, actor: Any, *arguments: Any) -> Any:
        if host.gone:
            raise MountError(f"host {host.name} cannot mount anything: {host.gone}")
        procs = spawn_tool(host, name)
        self._tools.append(procs)
        return procs.spawn(name, actor, *arguments)

    def _guard(self, _rank: int, mounted: MountedAt) -> None:
        if mounted.near:
            self._guardians.append(start_guardian(mounted.pid, mounted.path, mounted.source))

    def _each(self, what: str, calls: list[Future[Any]], then: Callable[[int, Any], None]) -> None:
        self._report(what, self._gather(calls, then))

    def _gather(
        self,
        calls: Sequence[Future[Any]],
        then: Callable[[int, Any], None] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> dict[int, str]:
        """Wait for calls, one a host; returns why some failed."""
        failed: dict[int, str] = {}
        for index, call in enumerate(calls):
            rank = index if ranks is None else ranks[index]
            try:
                value = call.get(_PATIENCE)
            except Exception as e:
                failed[rank] = _why(e)
            else:
                if then is not None:
                    then(rank, value)
        return failed

    def _report(self, what: str, failed: dict[int, str]) -> None:
        if failed:
            hosts = "; ".join(f"{self.names[rank]}: {why}" for rank, why in sorted(failed.items()))
            raise MountError(f"{len(failed)} of {len(self.names)} hosts did not {what}. {hosts}")


def _value(call: Future[Any], what: str) -> Any:
    try:
        return call.get(_PATIENCE)
    except Exception as e:
        raise MountError(f"{what} cannot be mounted: {_why(e)}") from None


def _why(error: Exception) -> str:
    """Why a call to one host failed, in a sentence."""
    if isinstance(error, SupervisionError):
        causes = [failure.death.cause for failure in error.failures if failure.death is not None]
        return causes[0] if causes else str(error)
    if isinstance(error, ActorError) and error.exception is not None:
        return str(error.exception)
    return str(error)
