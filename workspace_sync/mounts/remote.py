"""``remotemount``: mount a folder of the client on all hosts of a mesh, read on demand."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from monarch_kernel.actor import Future, HostMesh, this_host
from monarch_kernel.introspection import each_host
from monarch_kernel.runtime.actor.errors import SupervisionError
from workspace_sync.model.errors import MountError
from workspace_sync.mounts.host_mount import HostMount
from workspace_sync.mounts.mounting import PATIENCE, Processes, is_folder, namespace, why
from workspace_sync.mounts.source import Edition, MountSource


class MountHandler:
    """A folder of the client, mounted on all hosts of a mesh between ``open`` and ``close``.

    Also a context manager that does both. Created by ``remotemount``.
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
        """Mount the current content of the folder. Programs on the hosts can read it when this returns.

        Args:
            via_gateway: accepted for compatibility with Monarch; without effect, as blocks always take a direct path if
                there is one.

        Raises:
            MountError: it is open already, the folder cannot be read, or a host cannot mount it (then it is mounted on
                none).
        """
        if self._opened is not None:
            raise MountError(f"{self._path} is already mounted by this handle: refresh() shows what has changed")
        self._opened = _Opened(self._hosts, self._path, self._mntpoint)
        return self

    def refresh(self, sourcepath: str | None = None) -> None:
        """Show the current content of the folder. All hosts first receive the changes, then switch.

        Open files keep their old content. Parts of it that were never read, and no longer exist at the client, fail
        with EIO.

        Args:
            sourcepath: another folder to show from now on.

        Raises:
            MountError: the handle is not open, the folder cannot be read (the mounts are unchanged), or hosts failed
                and keep the old content; the message names them.
        """
        path = self._path if sourcepath is None else os.path.abspath(os.path.expanduser(os.fspath(sourcepath)))
        if self._opened is None:
            raise MountError(f"{self._path} is not mounted: open() the handle first")
        self._opened.refresh(path)
        self._path = path

    def close(self) -> None:
        """Unmount on all hosts, even while programs use the mount. Do nothing if it is not open.

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

    ``open()`` reads the folder and mounts its names. The content of a file is sent when it is first read: about once
    from this machine, then from host to host. Small files of code are prefetched.

    Args:
        host_mesh: the hosts.
        sourcepath: a folder of this machine.
        mntpoint: the mount point on the hosts, an empty folder or a path that does not exist; by default the path of
            the folder on this machine.

    Source: the names and semantics are those of ``monarch.remotemount``.
    """
    return MountHandler(host_mesh, sourcepath, mntpoint)


class _Opened:
    """Processes of an open mount."""

    def __init__(self, host_mesh: HostMesh, path: str, mntpoint: str) -> None:
        folder = is_folder(path)
        hosts = each_host(host_mesh)
        self._names = [host.name for host in hosts]
        self._processes = Processes()
        self._mounts: list[Any] = []
        try:
            [here] = each_host(this_host())
            #: The actor that reads the folder.
            self.source = self._processes.spawn(here, "mount-source", MountSource)
            for rank, host in enumerate(hosts):
                self._mounts.append(self._processes.spawn(host, "mount", HostMount, rank, len(hosts), self.source))
            self.source.joined.call_one(self._mounts).get(PATIENCE)
            edition = self._publish(path)
            calls = [mount.open.call_one(mntpoint, edition, namespace(), folder) for mount in self._mounts]
            self._report("mount", self._gather(calls, lambda _, mounted: self._processes.guard(mounted)))
        except BaseException:
            self._gather([mount.close.call_one() for mount in self._mounts])
            self._processes.end()
            raise

    def refresh(self, path: str) -> None:
        is_folder(path)
        edition = self._publish(path)
        ready: list[int] = []
        failed = self._gather(
            [mount.prepare.call_one(edition) for mount in self._mounts], lambda rank, _: ready.append(rank)
        )
        failed |= self._gather([self._mounts[rank].switch.call_one() for rank in ready], None, ready)
        self._report("show the new content", failed)

    def close(self) -> None:
        failed = self._gather([mount.close.call_one() for mount in self._mounts], none_if_dead=True)
        self._processes.end()
        self._report("unmount", failed)

    def _publish(self, path: str) -> Edition:
        try:
            return self.source.publish.call_one(path).get(PATIENCE)
        except Exception as e:
            raise MountError(f"the folder {path} cannot be mounted: {why(e)}") from None

    def _gather(
        self,
        calls: Sequence[Future[object]],
        then: Callable[[int, Any], None] | None = None,
        ranks: Sequence[int] | None = None,
        none_if_dead: bool = False,
    ) -> dict[int, str]:
        """Wait for calls, one for each host; return the reasons of failures.

        With ``none_if_dead``, the death of a host is no failure.
        """
        failed: dict[int, str] = {}
        for index, call in enumerate(calls):
            rank = index if ranks is None else ranks[index]
            try:
                value = call.get(PATIENCE)
            except Exception as e:
                if not (none_if_dead and isinstance(e, SupervisionError)):
                    failed[rank] = why(e)
            else:
                if then is not None:
                    then(rank, value)
        return failed

    def _report(self, what: str, failed: dict[int, str]) -> None:
        if failed:
            hosts = "; ".join(f"{self._names[rank]}: {cause}" for rank, cause in sorted(failed.items()))
            raise MountError(f"{len(failed)} of {len(self._names)} hosts did not {what}. {hosts}")
