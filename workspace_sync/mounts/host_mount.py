"""Serve a remote mount on one host: an actor in a separate process."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import warnings
from typing import Any

from monarch_kernel.actor import Actor, concurrent_endpoint, endpoint
from monarch_kernel.rdma import RDMATcpFallbackWarning
from workspace_sync.model.errors import MountError
from workspace_sync.model.manifest import Manifest, decode_delta, patched
from workspace_sync.mounts.blocks import HostBlocks
from workspace_sync.mounts.layout import PackedSegment
from workspace_sync.mounts.mounting import Mount, MountedAt, namespace
from workspace_sync.mounts.protocol import GREETING, Caching, FuseSession
from workspace_sync.mounts.source import Edition, Loan, Slabs
from workspace_sync.mounts.tree import ManifestTree


class HostMount(Actor):
    """Server of a folder of the client at a mount point of this host.

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
        self._slabs = Slabs()
        self._mount: Mount | None = None
        self._session: FuseSession | None = None
        self._tree: ManifestTree | None = None
        self._blocks: HostBlocks | None = None
        self._next: tuple[Manifest, PackedSegment] | None = None

    @endpoint
    async def open(self, path: str, edition: Edition, client: tuple[str, str], folder: tuple[int, int]) -> MountedAt:
        """Mount.

        Args:
            path: the mount point.
            edition: the whole content.
            client: the ``namespace()`` of the caller.
            folder: device and inode of the folder at the client.

        Raises:
            MountError: it cannot be mounted here.
        """
        return await asyncio.to_thread(self._open, path, edition, client, folder)

    @endpoint
    async def prepare(self, edition: Edition) -> None:
        """Receive the content for the next ``switch``.

        Raises:
            MountError: the mount has ended.
        """
        await asyncio.to_thread(self._prepare, edition)

    @endpoint
    async def switch(self) -> None:
        """Switch to the prepared content."""
        await asyncio.to_thread(self._switch)

    @concurrent_endpoint
    async def lend(self, segment: int, block: int) -> Loan | None:
        """Lend a block to another host, which returns it with ``give_back``; None: the block is not here."""
        if self._blocks is None:
            return None
        slab = await self._slabs.get(self._blocks.size_of(segment, block))
        try:
            missing = await asyncio.to_thread(self._blocks.lend, segment, block, slab.memory)
        except BaseException:
            self._slabs.free(slab)
            raise
        if missing is None:
            self._slabs.free(slab)
            return None
        return Loan(slab.buffer, missing, self._slabs.lend(slab))

    @endpoint
    async def give_back(self, loan: int) -> None:
        """Take back a lent block after the other host has read it."""
        self._slabs.give_back(loan)

    @endpoint
    async def received(self) -> int:
        """Return the number of bytes received by this host."""
        return 0 if self._blocks is None else self._blocks.received

    @endpoint
    async def close(self) -> None:
        """Unmount, even while programs use the mount.

        Raises:
            MountError: it could not be unmounted.
        """
        await asyncio.to_thread(self._unmount)

    async def __cleanup__(self, _error: BaseException | None) -> None:
        await asyncio.to_thread(self._unmount)

    def _open(self, path: str, edition: Edition, client: tuple[str, str], folder: tuple[int, int]) -> MountedAt:
        here = namespace()
        mount = self._mount = Mount(path, "remotemount", folder if here[0] == client[0] else None)
        # This process must never access its own mount.
        sys.path[:] = [entry for entry in sys.path if entry and not _is_below(entry, mount.path)]
        near = here == client
        try:
            self._blocks = HostBlocks(self._rank, self._source)
            self._blocks.add(edition.segment)
            self._tree = ManifestTree(patched(None, decode_delta(edition.change)), self._blocks)
            self._session = FuseSession(mount.device, self._tree, Caching(names=None, contents=True))
            if not near:
                mount.guard()
            if not self._session.wait_ready(GREETING):
                raise MountError(f"the kernel of {socket.gethostname()} did not accept the mount at {mount.path}")
        except BaseException:
            self._unmount()
            raise
        self._blocks.prefill(edition.segment, self._rank, self._hosts)
        return MountedAt(os.getpid(), mount.path, mount.source, near)

    def _prepare(self, edition: Edition) -> None:
        if self._session is None or self._session.over or self._tree is None or self._blocks is None:
            raise MountError("the mount has ended: close it, and open it again")
        self._next = patched(self._tree.manifest, decode_delta(edition.change)), edition.segment
        self._blocks.add(edition.segment)
        self._blocks.retry()

    def _switch(self) -> None:
        assert self._tree is not None and self._session is not None
        assert self._blocks is not None and self._next is not None
        (manifest, segment), self._next = self._next, None
        if manifest.digest == self._tree.manifest.digest:
            return
        self._tree.switch(manifest, self._session)
        self._blocks.prefill(segment, self._rank, self._hosts)
        blocks, tree = self._blocks, self._tree
        threading.Thread(target=lambda: blocks.drop_unused(tree.live()), name="mount-space", daemon=True).start()

    def _unmount(self) -> None:
        mount, self._mount = self._mount, None
        if mount is not None:
            mount.close()
        if self._blocks is not None:
            self._blocks.close()


def _is_below(path: str, folder: str) -> bool:
    path = os.path.abspath(path)
    return path == folder or path.startswith(folder.rstrip("/") + "/")
