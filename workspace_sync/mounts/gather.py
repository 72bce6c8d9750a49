"""``gather_mount``: mount the folders of all hosts of a mesh on this machine, side by side."""

from __future__ import annotations

import os
import socket
import time
import warnings
from typing import Any

from monarch_kernel.actor import Actor, HostMesh, endpoint, this_host
from monarch_kernel.introspection import each_host
from monarch_kernel.rdma import RDMATcpFallbackWarning
from workspace_sync.model.errors import MountError
from workspace_sync.mounts.gathered_tree import FRESH, GatheredTree
from workspace_sync.mounts.mounting import PATIENCE, Mount, MountedAt, Processes, why
from workspace_sync.mounts.protocol import GREETING, Caching, FuseSession
from workspace_sync.mounts.served_folder import ServedFolder

#: The placeholder in the path on the hosts that is replaced by the name of the host's folder in the mount.
SUBDIR = "$SUBDIR"


class GatherMount:
    """Folders of hosts, mounted on this machine from creation until ``close``. Also a context manager.

    Created by ``gather_mount``.
    """

    def __init__(self, host_mesh: HostMesh, remote_mount_point: str, local_mount_point: str) -> None:
        self._remote = os.fspath(remote_mount_point)
        self._local = os.path.abspath(os.path.expanduser(os.fspath(local_mount_point)))
        if not self._remote.startswith(("/", "~")):
            raise MountError(
                f"the path {self._remote!r} is relative: name the whole path, as hosts have different folders"
            )
        hosts = each_host(host_mesh)
        names = [_name(point) for point in host_mesh.extent.points()]
        self._processes: Processes | None = Processes()
        try:
            folders = [
                self._processes.spawn(host, "gather", ServedFolder, self._remote.replace(SUBDIR, name))
                for host, name in zip(hosts, names, strict=True)
            ]
            [here] = each_host(this_host())
            self._server = self._processes.spawn(here, "gather-server", GatherServer)
            shown = [name.encode() for name in names if name]
            try:
                mounted = self._server.open.call_one(self._local, shown, folders, os.getpid()).get(PATIENCE)
            except Exception as e:
                raise MountError(why(e)) from None
            self._processes.guard(mounted)
        except BaseException:
            self._processes.end()
            raise

    def close(self, *, deadline: float | None = None) -> None:
        """Unmount, even while programs use the mount. Do nothing if it is closed.

        Args:
            deadline: the time limit, as a time of ``time.monotonic()``.

        Raises:
            MountError: it could not be unmounted.
        """
        processes, self._processes = self._processes, None
        if processes is None:
            return
        patience = PATIENCE if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            self._server.close.call_one().get(patience)
        except Exception as e:
            raise MountError(f"{self._local} could not be unmounted: {why(e)}") from None
        finally:
            processes.end()

    def __enter__(self) -> GatherMount:
        if self._processes is None:
            raise MountError(f"the mount at {self._local} is closed: make another one with gather_mount()")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._processes is not None else "closed"
        return f"<GatherMount of {self._remote} at {self._local}, {state}>"


def gather_mount(host_mesh: HostMesh, remote_mount_point: str, local_mount_point: str) -> GatherMount:
    """Mount a folder of each host of a mesh on this machine, read-only, in its current state at any time.

    Each folder is named after its host's coordinates (``hosts_0``, ``racks_1_hosts_3``). For a mesh without dimensions,
    the folder itself is mounted. A folder appears empty until it exists. Sizes are at most half a second old. A read
    from a dead host fails with EIO; other hosts are not affected.

    Args:
        host_mesh: the hosts.
        remote_mount_point: the folder or file on every host; ``$SUBDIR`` in it is replaced by the name above.
        local_mount_point: the mount point on this machine, an empty folder or a path that does not exist.

    Raises:
        MountError: it cannot be mounted; the message names the reason and the remedy.

    Source: the names and semantics are those of ``monarch.gather_mount``.
    """
    return GatherMount(host_mesh, remote_mount_point, local_mount_point)


def _name(point: Any) -> str:
    return "_".join(f"{dimension}_{at}" for dimension, at in point.items())


#: The time after which requests to a silent host fail with EIO (seconds).
_DEADLINE = 30.0


class GatherServer(Actor):
    """Server of the folders of hosts at one mount point of this host."""

    __tool__ = True

    def __init__(self) -> None:
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        self._mount: Mount | None = None

    @endpoint
    def open(self, path: str, names: list[bytes], hosts: list[Any], gateway: int) -> MountedAt:
        """Mount.

        Args:
            path: the mount point.
            names: the names of the hosts' folders in the mount; empty: there is one host, and its folder itself is
                mounted.
            hosts: the actor of each host.
            gateway: the id of the process through which they are reached.

        Raises:
            MountError: it cannot be mounted.
        """
        mount = self._mount = Mount(path, "gather_mount")
        session = FuseSession(
            mount.device, GatheredTree(names, hosts, gateway), Caching(names=FRESH, contents=False), _DEADLINE
        )
        if not session.wait_ready(GREETING):
            mount.close()
            raise MountError(f"the kernel of {socket.gethostname()} did not accept the mount at {mount.path}")
        return MountedAt(os.getpid(), mount.path, mount.source, near=True)

    @endpoint
    def close(self) -> None:
        """Unmount, even while programs use the mount.

        Raises:
            MountError: it could not be unmounted.
        """
        self._unmount()

    def __cleanup__(self, _error: BaseException | None) -> None:
        self._unmount()

    def _unmount(self) -> None:
        mount, self._mount = self._mount, None
        if mount is not None:
            mount.close()
