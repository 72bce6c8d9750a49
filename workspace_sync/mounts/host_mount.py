"""Serve a remote mount on one host: an actor in a separate process."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import socket
import stat
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from monarch_kernel.actor import Actor, concurrent_endpoint, endpoint
from monarch_kernel.rdma import RDMATcpFallbackWarning
from workspace_sync.model.errors import MountError
from workspace_sync.model.manifest import FileEntry, Folder, Manifest, changes, decode_delta, entry_path, patched
from workspace_sync.mounts.blocks import HostBlocks
from workspace_sync.mounts.layout import PackedSegment
from workspace_sync.mounts.mounting import Mount, MountedAt, namespace
from workspace_sync.mounts.protocol import (
    GREETING,
    ROOT,
    Attributes,
    Caching,
    Entered,
    FuseSession,
    InodeTable,
    Listed,
    Request,
)
from workspace_sync.mounts.source import Edition, Loan, Slabs

# File system of a remote mount: one manifest at a time, whose files are read from blocks.
#
# An inode is one version of a file: name, content, mode and time. After a change, the name refers to a new inode, and
# the old inode remains for processes that have it open. The kernel may therefore cache everything indefinitely, and
# pages of different versions never mix.

#: The number of cached folder listings.
_LISTINGS = 16
#: The identity of an inode: its path, and a value that distinguishes the versions of a file or link.
_Key = tuple[bytes, bytes | tuple[bytes, int, int] | None]


def _key(path: bytes, what: FileEntry | bytes | None) -> _Key:
    return path, (what.digest, what.mode, what.mtime) if isinstance(what, FileEntry) else what


def _inode(key: _Key) -> int:
    """Return the inode number that ``stat`` and listings show."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1 | 1 << 32


@dataclass(slots=True)
class _Node:
    """An inode. ``what`` is the entry of a file or the target of a link; None for a folder, whose key is its path."""

    number: int
    path: bytes
    what: FileEntry | bytes | None
    lookups: int = 0


def _key_of(node: _Node) -> _Key:
    return _key(node.path, node.what)


class ManifestTree:
    """A read-only file system with the content of a manifest.

    Args:
        manifest: the first one.
        content: provides the bytes of files.
    """

    def __init__(self, manifest: Manifest, content: HostBlocks) -> None:
        self._manifest = manifest
        self._content = content
        self._lock = threading.Lock()
        self._inodes: InodeTable[_Key, _Node] = InodeTable(_key_of, _Node(ROOT, b"", None, 1))
        # When a folder last changed (ns): Python and others cache listings while this is unchanged.
        self._opened = time.time_ns()
        self._times: dict[bytes, int] = {}
        self._listings: dict[tuple[bytes, bytes], list[Listed]] = {}

    @property
    def manifest(self) -> Manifest:
        """The manifest that the mount shows."""
        return self._manifest

    def switch(self, manifest: Manifest, session: FuseSession) -> None:
        """Switch to another manifest, and make the kernel forget entries that differ."""
        old = self._manifest
        changed = list(changes(old, manifest))
        now = time.time_ns()
        with self._lock:
            self._manifest = manifest
            stale: list[tuple[int, bytes]] = []
            folders: set[int] = set()
            for change in changed:
                for path in {change.path, change.path.rpartition(b"/")[0]}:
                    if path in manifest.folders:
                        self._times[path] = now
                    if (own := self._inodes.by_key.get((path, None))) is not None:
                        folders.add(own.number)
            # No digest covers the times of files, but they are visible.
            paths = [change.path for change in changed]
            paths += (
                node.path
                for node in self._inodes.by_key.values()
                if isinstance(node.what, FileEntry) and manifest.file(node.path) != node.what
            )
            for path in paths:
                parent, _, name = path.rpartition(b"/")
                above = self._inodes.by_key.get((parent, None))
                if above is not None and path:
                    stale.append((above.number, name))
        for number, name in dict.fromkeys(stale):
            session.invalidate_entry(number, name)
        for number in folders:
            session.invalidate_node(number)

    def live(self) -> set[bytes]:
        """Return the digests of all pieces that may still be read: of the manifest, and of open files of older ones."""
        with self._lock:
            entries = [node.what for node in self._inodes.by_number.values() if isinstance(node.what, FileEntry)]
            manifest = self._manifest
        entries += (entry for _, entry in manifest.files())
        return {digest for entry in entries for digest, _, _ in entry.pieces()}

    # -- requests ----------------------------------------------------------------------------------------

    def lookup(self, request: Request, parent: int, name: bytes) -> None:
        with self._lock:
            folder = self._folder(parent)
            found = None if folder is None else self._enter(self._inodes.by_number[parent].path, folder, name)
        request.found(found or Entered(0))

    def getattr(self, request: Request, node: int) -> None:
        with self._lock:
            about = self._about(self._inodes.by_number[node])
        if about is None:
            request.fail(errno.ESTALE)
        else:
            request.attributes(about)

    def readlink(self, request: Request, node: int) -> None:
        target = self._inodes.by_number[node].what
        assert isinstance(target, bytes)
        request.data(target)

    def open(self, request: Request, node: int) -> None:
        request.fail(errno.ENOSYS)  # the kernel then opens files without requests

    def release(self, handle: int) -> None:
        pass

    def read(self, request: Request, node: int, handle: int, offset: int, size: int) -> None:
        entry = self._inodes.by_number[node].what
        assert isinstance(entry, FileEntry)
        size = min(size, entry.size - offset)
        if size <= 0:
            request.data()
            return

        def done(result: list[bytes] | OSError) -> None:
            if isinstance(result, OSError):
                request.fail(result.errno or errno.EIO)
            else:
                request.data(*result)

        request.later()
        request.cancelled = self._content.read(entry, offset, size, done)

    def opendir(self, request: Request, node: int) -> None:
        request.fail(errno.ENOSYS)

    def releasedir(self, handle: int) -> None:
        pass

    def readdir(self, request: Request, node: int, handle: int, offset: int, size: int, plus: bool) -> None:
        with self._lock:
            here = self._inodes.by_number[node]
            folder = self._folder(node)
            if folder is None:
                request.fail(errno.ENOENT)
                return
            entries = self._entries(here.path, folder)
            if not plus:
                request.entries(entries, offset, size)
                return

            def find(listed: Listed) -> Entered:
                found = self._enter(here.path, folder, listed.name)
                assert found is not None
                return found

            request.entries_plus(entries, offset, size, find)

    def statfs(self, request: Request) -> None:
        files, size = self._manifest.count()
        request.space(size, 0, files)

    def forget(self, node: int, count: int) -> None:
        with self._lock:
            self._inodes.forget(node, count)

    # -- inodes ------------------------------------------------------------------------------------------

    def _entries(self, path: bytes, folder: Folder) -> list[Listed]:
        """Return the entries of a folder; cache them, because the kernel reads a large folder in many parts."""
        key = path, folder.digest
        entries = self._listings.get(key)
        if entries is None:
            entries = self._listings[key] = _listing(path, folder)
            while len(self._listings) > _LISTINGS:
                del self._listings[next(iter(self._listings))]
        return entries

    def _folder(self, number: int) -> Folder | None:
        node = self._inodes.by_number[number]
        return self._manifest.folders.get(node.path) if node.what is None else None

    def _enter(self, parent: bytes, folder: Folder, name: bytes) -> Entered | None:
        """Look a name up in a folder, and count the lookup."""
        path = entry_path(parent, name)
        what: FileEntry | bytes | None
        if name in folder.files:
            what = folder.files[name]
        elif name in folder.links:
            what = folder.links[name]
        elif name in folder.folders:
            what = None
        else:
            return None
        node = self._inodes.enter(_key(path, what), lambda number: _Node(number, path, what))
        return Entered(node.number, self._about(node))

    def _about(self, node: _Node) -> Attributes | None:
        what = node.what
        inode = _inode(_key_of(node))
        if isinstance(what, FileEntry):
            return Attributes(inode, stat.S_IFREG | what.mode, what.size, what.mtime)
        if isinstance(what, bytes):
            return Attributes(inode, stat.S_IFLNK | 0o777, len(what), self._opened)
        folder = self._manifest.folders.get(node.path)
        if folder is None:
            return None
        changed = self._times.get(node.path, self._opened)
        return Attributes(inode, stat.S_IFDIR | folder.mode, 4096, changed, 2 + len(folder.folders))


def _listing(path: bytes, folder: Folder) -> list[Listed]:
    """Build the sorted entries of a folder."""
    prefix = path + b"/" if path else b""

    def listed(names: Mapping[bytes, FileEntry | bytes | None], kind: int) -> Iterator[Listed]:
        for name, what in names.items():
            yield Listed(name, _inode(_key(prefix + name, what)), kind)

    entries = [*listed(folder.files, stat.S_IFREG), *listed(folder.links, stat.S_IFLNK)]
    entries += listed(dict.fromkeys(folder.folders), stat.S_IFDIR)
    entries.sort(key=lambda entry: entry.name)
    here = _inode((path, None))
    above = _inode((path.rpartition(b"/")[0], None))
    return [Listed(b".", here, stat.S_IFDIR), Listed(b"..", above, stat.S_IFDIR), *entries]


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
