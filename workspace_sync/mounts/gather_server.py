"""The client's side of a gathered mount: an actor, in a process of its own, that serves it."""

from __future__ import annotations

import os
import socket
import warnings
from typing import Any

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.rdma import RDMATcpFallbackWarning
from workspace_sync.model.errors import MountError
from workspace_sync.mounts.gathered_tree import FRESH, GatheredTree
from workspace_sync.mounts.mounting import Mount
from workspace_sync.mounts.processes import MountedAt
from workspace_sync.mounts.protocol import GREETING, Caching, FuseSession

#: A host that answers nothing for so long gives EIO (seconds).
_DEADLINE = 30.0


class GatherServer(Actor):
    """Serves the folders of hosts at one mount point of this host."""

    __tool__ = True

    def __init__(self) -> None:
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        self._mount: Mount | None = None

    @endpoint
    def open(self, path: str, names: list[bytes], hosts: list[Any], gateway: int) -> MountedAt:
        """Mount.

        Args:
            path: the mount point.
            names: of the folders of the hosts; none: there is one host, and its folder is mounted itself.
            hosts: the actor of each.
            gateway: the process through which they are reached.

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
        """Unmount, also while programs use it.

        Raises:
            MountError: it stays mounted.
        """
        self._unmount()

    def __cleanup__(self, _error: BaseException | None) -> None:
        self._unmount()

    def _unmount(self) -> None:
        mount, self._mount = self._mount, None
        if mount is not None:
            mount.close()
