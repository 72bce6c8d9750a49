"""Remember a workspace between runs, so that an unchanged file is not read again.

The index holds a record of each folder: what ``scandir`` and ``lstat`` last said of its entries (the *hints*), and the
entries' place in the manifest. It is only a memory: without it, or with a damaged one, everything is hashed again. A
file is trusted by its size, mtime, ctime, inode and device, as in git, and distrusted if its times are as recent as
the scan that read it, since a later change in the same tick of the clock would not show
(https://git-scm.com/docs/racy-git).

It also keeps the manifests that were synced last, by their digests, so that a host gets only what differs from its own.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import TypeVar

import msgspec

from monarch_kernel.private_files import PrivateFolder
from workspace_sync.model.manifest import DIGEST_SIZE, Folder, Manifest, digest_of
from workspace_sync.model.workspace import sync_folder

_T = TypeVar("_T")
_MAGIC = b"monarch index 1\n"
#: How many manifests are kept, the youngest, and their total size (bytes).
_MANIFESTS = 8
_MANIFEST_BYTES = 64 << 20
#: How many of them this process holds.
_RECENT = 4
#: No index is larger: 10 million files (bytes).
_LARGEST = 2 << 30


class LeftOutEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An entry of a folder that is left out.

    Attributes:
        reason: which line of which file says so: a number in ``Index.reasons``.
        size: bytes, if it is a file.
        folder: whether it is a folder, whose content is unknown, as it is not entered.
    """

    reason: int
    size: int = 0
    folder: bool = False


class Record(msgspec.Struct, array_like=True, gc=False):
    """A folder as it was found.

    Attributes:
        hints: what was found of its entries (see ``walk``); empty: nothing is to be trusted.
        outer: the digest of the ignore rules that hold for the folder itself.
        inner: ... and of those for its entries, with the folder's own.
        ignored: the entries that are left out, by name.
        subfolders: the names of the folders that are entered.
        folder: its entry in the manifest.
        anchors: of its large files, by name; see ``chunking.Cuts``.
    """

    hints: bytes
    outer: bytes
    inner: bytes
    ignored: dict[bytes, LeftOutEntry]
    subfolders: list[bytes]
    folder: Folder
    anchors: dict[bytes, bytes] = {}


class _Saved(msgspec.Struct, array_like=True):
    roots: dict[str, str]
    links: str
    reasons: list[str]
    records: dict[bytes, Record]
    between: dict[bytes, Folder]  # folders of the tree above those of the workspace


class Index:
    """The memory of one workspace. One scan at a time may use it.

    Args:
        workspace: the id of the workspace.
        root: where it is kept. None: ``MONARCH_KERNEL_SYNC_FOLDER``, or ``~/.cache/monarch_kernel/sync``.
    """

    def __init__(self, workspace: str, root: str | None = None) -> None:
        #: Its folder.
        self.path = os.path.join(sync_folder(root), "client", workspace)
        #: The folders of the workspace by their paths in the tree.
        self.records: dict[bytes, Record] = {}
        #: Why entries are left out, as ``file:line: pattern``.
        self.reasons: list[str] = []
        self._recent: dict[bytes, Manifest] = {}
        self._about: tuple[dict[str, str], str] = ({}, "")
        self._loaded = False
        self._changed = False

    # -- the records ---------------------------------------------------------------------------------

    def load(self, roots: dict[str, str], links: str) -> None:
        """Read the index from disk, once. One that is damaged, or of other folders, counts as none."""
        if self._loaded and self._about == (roots, links):
            return
        first = not self._loaded
        self._loaded, self._about = True, (roots, links)
        self.records, self.reasons = {}, []
        saved = self._read("index", _Saved) if first else None
        if saved is None or (saved.roots, saved.links) != self._about:
            return
        self.records, self.reasons = saved.records, saved.reasons
        folders = {place: record.folder for place, record in saved.records.items()}
        if b"" in folders or b"" in saved.between:
            self._know(Manifest(saved.between | folders))

    def replace(self, records: dict[bytes, Record], reasons: list[str], manifest: Manifest, *, changed: bool) -> None:
        """Enter the results of a scan; ``save`` writes them."""
        self.records, self.reasons = records, reasons
        self._know(manifest)
        self._changed |= changed

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the last scan; None: it is not known."""
        return next(reversed(self._recent.values()), None)

    @property
    def changed(self) -> bool:
        """Whether there is something to save."""
        return self._changed

    def save(self) -> None:
        """Write the index atomically, if it has changed. A disk that takes nothing is no error: it is only a memory."""
        self.to_save()()

    def to_save(self) -> Callable[[], None]:
        """Return a function that writes the index as it is now, later and on any thread."""
        if not self._changed:
            return lambda: None
        self._changed = False
        newest = next(reversed(self._recent.values()))
        between = {path: folder for path, folder in newest.folders.items() if path not in self.records}
        saved = _Saved(*self._about, self.reasons, self.records, between)

        def write() -> None:
            if not self._write("index", saved):
                self._changed = True

        return write

    # -- manifests -----------------------------------------------------------------------------------

    def remember(self, manifest: Manifest) -> None:
        """Keep a manifest that was synced, beside the last few. It may be called on any thread."""
        name = f"{manifest.digest.hex()}.manifest"
        if self._touch(name) or self._write(name, manifest.folders):
            self._forget(name)

    def remembered(self, digest: bytes) -> Manifest | None:
        """A manifest that was scanned or kept; None if it is not known any more, or damaged."""
        if (known := self._recent.get(digest)) is not None:
            return known
        folders = self._read(f"{digest.hex()}.manifest", dict[bytes, Folder])
        if folders is None or b"" not in folders or folders[b""].digest != digest:
            return None
        return Manifest(folders)

    def _know(self, manifest: Manifest) -> None:
        # They share the folders that are equal, so a few of them take little.
        self._recent.pop(manifest.digest, None)
        self._recent[manifest.digest] = manifest
        while len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]

    def _touch(self, name: str) -> bool:
        def touch(folder: PrivateFolder) -> bool:
            os.utime(name, dir_fd=folder.fd, follow_symlinks=False)
            return True

        return self._within(touch) or False

    def _forget(self, newest: str) -> None:
        def clear(folder: PrivateFolder) -> None:
            kept: list[tuple[float, int, str]] = []
            for name in folder.names():
                if name.endswith(".manifest") and name != newest:
                    about = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
                    kept.append((about.st_mtime, about.st_size, name))
            room = _MANIFEST_BYTES
            for i, (_, size, name) in enumerate(sorted(kept, reverse=True)):
                room -= size
                if room < 0 or i + 1 >= _MANIFESTS:
                    os.unlink(name, dir_fd=folder.fd)

        self._within(clear)

    # -- files ---------------------------------------------------------------------------------------

    def load_file(self, name: str) -> memoryview | None:
        """Read a file of ``save_file``; None if there is none, or it is damaged."""

        def read(folder: PrivateFolder) -> bytes:
            with os.fdopen(folder.open_file(name, os.O_RDONLY), "rb") as file:
                return file.read(_LARGEST)

        data = self._within(read)
        if data is None or not data.startswith(_MAGIC):
            return None
        body = memoryview(data)[len(_MAGIC) + DIGEST_SIZE :]
        return body if digest_of(body) == data[len(_MAGIC) : len(_MAGIC) + DIGEST_SIZE] else None

    def save_file(self, name: str, data: bytes) -> bool:
        """Keep a file beside the index, written atomically; returns whether the disk took it."""

        def write(folder: PrivateFolder) -> bool:
            # One name and a lock, and not a random name: a client that is killed leaves one file, and the next uses it.
            fd = folder.open_file(f"{name}.new", os.O_WRONLY | os.O_CREAT)
            with os.fdopen(fd, "wb", buffering=0) as file:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False  # another client of the workspace writes its own, which is as good
                about = os.stat(f"{name}.new", dir_fd=folder.fd, follow_symlinks=False)
                if about.st_ino != os.fstat(fd).st_ino:
                    return False
                file.truncate(0)
                for part in (_MAGIC + digest_of(data), data):
                    left = memoryview(part)
                    while left:
                        left = left[file.write(left) or 0 :]
                os.rename(f"{name}.new", name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
            return True

        return self._within(write, make=True) or False

    def _read(self, name: str, kind: type[_T]) -> _T | None:
        data = self.load_file(name)
        if data is None:
            return None
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def _write(self, name: str, content: object) -> bool:
        return self.save_file(name, msgspec.msgpack.encode(content))

    def _within(self, work: Callable[[PrivateFolder], _T], *, make: bool = False) -> _T | None:
        try:
            with PrivateFolder.made(self.path) if make else PrivateFolder.open(self.path) as folder:
                return work(folder)
        except OSError:
            return None
