"""File system of a remote mount: one manifest at a time, whose files are read from blocks.

An inode is one version of a file: name, content, mode and time. After a change, the name refers to a new inode, and the
old inode remains for processes that have it open. The kernel may therefore cache everything indefinitely, and pages of
different versions never mix.
"""

from __future__ import annotations

import errno
import hashlib
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from workspace_sync.model.manifest import FileEntry, Folder, Manifest, changes, entry_path
from workspace_sync.mounts.blocks import HostBlocks
from workspace_sync.mounts.protocol import ROOT, Attributes, Entered, FuseSession, InodeTable, Listed, Request

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
