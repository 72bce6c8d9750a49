"""A remote mount on one host: an actor, in a process of its own, that serves the mount and gets the blocks for it."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from typing import Any

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.errors import ActorError, RDMAError, SupervisionError
from monarch_kernel.rdma import RDMABuffer, RDMATcpFallbackWarning
from workspace_sync.model.errors import MountError
from workspace_sync.model.manifest import Manifest, decode_delta, patched
from workspace_sync.mounts.blocks import Fetched, FetchError, HostBlocks
from workspace_sync.mounts.layout import PackedSegment
from workspace_sync.mounts.mounting import Mount, namespace
from workspace_sync.mounts.processes import MountedAt
from workspace_sync.mounts.protocol import GREETING, Caching, FuseSession
from workspace_sync.mounts.routes import CLIENT
from workspace_sync.mounts.source import Edition, Way
from workspace_sync.mounts.spool import spool_folder
from workspace_sync.mounts.tree import ManifestTree

log = logging.getLogger(__name__)

#: How long a transfer of one block may take (seconds).
_TRANSFER = 60.0
#: How often a block is asked for until it counts as lost.
_ATTEMPTS = 5


class HostMount(Actor):
    """Serves a folder of the client at a mount point of this host.

    Args:
        rank: the number of this host among those of the mount.
        hosts: their number.
        source: the client's actor.
    """

    __tool__ = True

    def __init__(self, rank: int, hosts: int, source: Any) -> None:
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        self._rank = rank
        self._hosts = hosts
        self._source = source
        self._mount: Mount | None = None
        self._session: FuseSession | None = None
        self._tree: ManifestTree | None = None
        self._blocks: HostBlocks | None = None
        self._next: Manifest | None = None
        self._fetching: PackedSegment | None = None

    @endpoint
    def open(self, path: str, edition: Edition, client: tuple[str, str], folder: tuple[int, int]) -> MountedAt:
        """Mount.

        Args:
            path: the mount point.
            edition: the whole content.
            client: the namespace of the caller.
            folder: device and inode of the folder at the client.

        Raises:
            MountError: it cannot be mounted here.
        """
        here = namespace()
        os.chdir("/")
        outside = folder if here[0] == client[0] else None
        mount = self._mount = Mount(path, "remotemount", outside)
        # This process must never look for anything in its own mount.
        sys.path[:] = [entry for entry in sys.path if entry and not _is_below(entry, mount.path)]
        near = here == client
        try:
            self._blocks = HostBlocks(spool_folder(), _BlockFetcher(self._rank, self._source))
            self._tree = ManifestTree(self._learn(edition), self._blocks)
            self._session = FuseSession(mount.device, self._tree, Caching(names=None, contents=True))
            if not near:
                mount.guard()
            if not self._session.wait_ready(GREETING):
                raise MountError(f"the kernel of {socket.gethostname()} did not accept the mount at {mount.path}")
        except BaseException:
            mount.close()
            raise
        self._prefill()
        return MountedAt(os.getpid(), mount.path, mount.source, near)

    @endpoint
    def prepare(self, edition: Edition) -> None:
        """Learn what the mount will show next.

        Raises:
            MountError: the mount has ended.
        """
        if self._session is None or self._session.over:
            raise MountError("the mount has ended: close it, and open it again")
        self._next = self._learn(edition)

    @endpoint
    def switch(self) -> None:
        """Show what was prepared."""
        assert self._tree is not None and self._session is not None and self._next is not None
        self._tree.switch(self._next, self._session)
        self._next = None
        self._prefill()

    @endpoint
    def received(self) -> int:
        """How many bytes have arrived here."""
        return 0 if self._blocks is None else self._blocks.received

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
        if self._blocks is not None:
            self._blocks.close()

    def _learn(self, edition: Edition) -> Manifest:
        assert self._blocks is not None
        manifest = patched(None if self._tree is None else self._tree.manifest, decode_delta(edition.change))
        file = self._blocks.add(edition.segment)
        self._blocks.retry()
        if edition.segment.blocks:
            memory = RDMABuffer(file.view)
            self._source.joined.call_one(self._rank, edition.segment.number, memory).get(_TRANSFER)
        self._fetching = edition.segment
        return manifest

    def _prefill(self) -> None:
        segment, self._fetching = self._fetching, None
        if segment is not None and self._blocks is not None:
            self._blocks.prefill(segment, self._rank, self._hosts)


class _BlockFetcher:
    """Gets blocks from the client or other hosts, as the client says."""

    def __init__(self, rank: int, source: Any) -> None:
        self._rank = rank
        self._source = source
        self._leases: dict[tuple[int, int], int] = {}

    def fetch(self, segment: int, block: int, into: memoryview) -> Fetched:
        avoid: frozenset[int] = frozenset()
        why = ""
        for _ in range(_ATTEMPTS):
            try:
                way: Way = self._source.route.call_one(self._rank, segment, block, avoid).get(_TRANSFER)
            except (SupervisionError, ActorError, TimeoutError) as e:
                raise FetchError(f"the client does not answer: {e}") from None
            try:
                way.buffer.read_into(into, offset=way.offset, size=len(into), timeout=_TRANSFER).get(_TRANSFER)
            except (RDMAError, TimeoutError) as e:
                why = str(e)
                self._source.failed.broadcast(self._rank, segment, block, way.source, way.lease, True)
                avoid |= {way.source} - {CLIENT}
                continue
            self._leases[segment, block] = way.lease
            return Fetched(way.source, way.missing)
        raise FetchError(why)

    def stored(self, segment: int, block: int, fetched: Fetched) -> None:
        lease = self._leases.pop((segment, block), 0)
        self._source.got.broadcast(self._rank, segment, block, fetched.source, lease)

    def rejected(self, segment: int, block: int, fetched: Fetched) -> None:
        lease = self._leases.pop((segment, block), 0)
        self._source.failed.broadcast(self._rank, segment, block, fetched.source, lease, True)


def _is_below(path: str, folder: str) -> bool:
    path = os.path.abspath(path)
    return path == folder or path.startswith(folder.rstrip("/") + "/")
