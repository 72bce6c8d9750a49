"""Cache of the scans of a workspace between runs, so that an unchanged file is not read again.

The index has a record of each folder: the last results of ``scandir`` and ``lstat`` for its entries (the *hints*), and
its folder in the manifest. It is only a cache: if it is missing or damaged, everything is hashed again. As in git, a
file counts as unchanged if its size, mtime, ctime, inode and device are unchanged. A file whose times are as recent as
the scan that read it is hashed again, because a later change in the same clock tick would be invisible
(https://git-scm.com/docs/racy-git).

The index also keeps the last synced manifests, by digest, so that only the difference is sent to a host.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from monarch_kernel.display.quantities import memory, text_size
from monarch_kernel.private_files import PrivateFolder
from workspace_sync.model.manifest import DIGEST_SIZE, Folder, Manifest, digest_of, entry_path, printable
from workspace_sync.model.workspace import sync_folder

_T = TypeVar("_T")
_MAGIC = b"monarch index 1\n"
#: The number of manifests that are kept, newest first, and their maximum total size (bytes).
_MANIFESTS = 8
_MANIFEST_BYTES = 64 << 20
#: The number of manifests that this process keeps in memory.
_RECENT = 4
#: The maximum size of an index: 10 million files (bytes).
_LARGEST = 2 << 30


class LeftOutEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An ignored entry of a folder.

    Attributes:
        reason: the file and line that ignore it: an index into ``Index.reasons``.
        size: its size if it is a file (bytes).
        folder: whether it is a folder. Its content is unknown, because it is not entered.
    """

    reason: int
    size: int = 0
    folder: bool = False


class Record(msgspec.Struct, array_like=True, gc=False):
    """A folder as found by a scan.

    Attributes:
        hints: the attributes of its entries (see ``walk``); empty: none can be trusted.
        outer: the digest of the ignore rules that apply to the folder itself.
        inner: the digest of the rules for its entries, including the folder's own.
        ignored: the ignored entries, by name.
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
    between: dict[bytes, Folder]  # folders of the tree above the workspace's folders


class Index:
    """Cache of one workspace. Only one scan at a time may use it.

    Args:
        workspace: the id of the workspace.
        root: the parent folder. None: ``MONARCH_KERNEL_SYNC_FOLDER``, or ``~/.cache/monarch_kernel/sync``.
    """

    def __init__(self, workspace: str, root: str | None = None) -> None:
        #: The folder of the index.
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
        """Read the index from disk, once. An index that is damaged, or of other folders, counts as missing."""
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
        """Replace the records by the results of a scan; ``save`` writes them."""
        self.records, self.reasons = records, reasons
        self._know(manifest)
        self._changed |= changed

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the last scan; None if unknown."""
        return next(reversed(self._recent.values()), None)

    @property
    def changed(self) -> bool:
        """Whether there are changes to save."""
        return self._changed

    def save(self) -> None:
        """Write the index atomically if it has changed. A failed write is no error: the index is only a cache."""
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
        """Keep a synced manifest, in addition to the last few. Thread-safe."""
        name = f"{manifest.digest.hex()}.manifest"
        if self._touch(name) or self._write(name, manifest.folders):
            self._forget(name)

    def remembered(self, digest: bytes) -> Manifest | None:
        """Return a manifest that was scanned or kept; None if it is no longer available, or damaged."""
        if (known := self._recent.get(digest)) is not None:
            return known
        folders = self._read(f"{digest.hex()}.manifest", dict[bytes, Folder])
        if folders is None or b"" not in folders or folders[b""].digest != digest:
            return None
        return Manifest(folders)

    def _know(self, manifest: Manifest) -> None:
        # Manifests share equal folders, so a few of them take little space.
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
        """Read a file of ``save_file``; return None if it is missing or damaged."""

        def read(folder: PrivateFolder) -> bytes:
            with os.fdopen(folder.open_file(name, os.O_RDONLY), "rb") as file:
                return file.read(_LARGEST)

        data = self._within(read)
        if data is None or not data.startswith(_MAGIC):
            return None
        body = memoryview(data)[len(_MAGIC) + DIGEST_SIZE :]
        return body if digest_of(body) == data[len(_MAGIC) : len(_MAGIC) + DIGEST_SIZE] else None

    def save_file(self, name: str, data: bytes) -> bool:
        """Write a file beside the index atomically; return whether the write succeeded."""

        def write(folder: PrivateFolder) -> bool:
            # One name with a lock, not a random name: a killed client leaves one file, which the next client reuses.
            fd = folder.open_file(f"{name}.new", os.O_WRONLY | os.O_CREAT)
            with os.fdopen(fd, "wb", buffering=0) as file:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False  # another client of the workspace writes its own version, which is equally valid
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


# Describe a large first sync before it starts: the content to send, and the content left out.

#: Larger first syncs are announced (files, bytes).
FILES = 10_000
BYTES = 1 << 30
#: The number of folders and of ignore lines that are listed.
_NAMED = 5


@dataclass(frozen=True)
class LeftOut:
    """Entries left out by one line of an ignore file.

    Attributes:
        source: ``file:line: text``, or ``default: text``.
        files: the number of files, outside ignored folders.
        folders: the number of folders, which are not entered.
        bytes: the size of the files when they were first seen.
        example: one of them, a path in the tree.
    """

    source: str
    files: int
    folders: int
    bytes: int
    example: bytes


@dataclass(frozen=True)
class FolderSize:
    """A folder with everything below it.

    Attributes:
        path: in the tree.
        files: files.
        bytes: their bytes.
    """

    path: bytes
    files: int
    bytes: int


@dataclass(frozen=True)
class Announcement:
    """Content of a first sync before it is sent; ``str`` renders it.

    Attributes:
        sources: the folders of the client.
        files: the number of files to send.
        bytes: their bytes.
        largest: the folders with most of the content, largest first.
        left_out: the ignored entries by line, largest first.
    """

    sources: list[str]
    files: int
    bytes: int
    largest: list[FolderSize]
    left_out: list[LeftOut]

    def __str__(self) -> str:
        lines = [f"The first sync sends {self.files:,} files ({_size(self.bytes)}) from {', '.join(self.sources)}."]
        if self.largest:
            lines.append("Most of it is in:")
            lines += [
                f"  {_size(each.bytes):>9}  {each.files:>9,} files  {printable(each.path) or '.'}"
                for each in self.largest
            ]
        if self.left_out:
            lines.append("Left out:")
            lines += [f"  {_amount(each)}  by {each.source}" for each in self.left_out[: 2 * _NAMED]]
            if len(self.left_out) > 2 * _NAMED:
                lines.append(f"  ... and by {len(self.left_out) - 2 * _NAMED} more lines")
        lines.append(f"Lines in {self.sources[0]}/.meshignore leave out more; they are written as in .gitignore.")
        return "\n".join(lines)


def announce(
    sizes: Mapping[bytes, Iterable[int]], records: dict[bytes, Record], reasons: list[str], sources: list[str]
) -> Announcement | None:
    """Describe a first sync; return None if it sends at most 10,000 files and 1 GB.

    Args:
        sizes: of the files (bytes), by the path of their folder in the tree.
        records: the records of the client's folders.
        reasons: the reasons why entries are left out.
        sources: the folders of the client.
    """
    own = {path: (len(each), sum(each)) for path, found in sizes.items() if (each := list(found))}
    files, size = (sum(each) for each in zip((0, 0), *own.values(), strict=True))
    if files <= FILES and size <= BYTES:
        return None
    return Announcement(sources, files, size, largest_folders(own), left_out(records, reasons))


def sizes_in(manifest: Manifest) -> Iterator[tuple[bytes, list[int]]]:
    """Iterate over the folders of a manifest with the sizes of their files."""
    for path, folder in manifest.folders.items():
        yield path, [entry.size for entry in folder.files.values()]


def left_out(records: dict[bytes, Record], reasons: list[str]) -> list[LeftOut]:
    """Count the entries that each line leaves out, most bytes first."""
    files: dict[int, int] = {}
    folders: dict[int, int] = {}
    sizes: dict[int, int] = {}
    examples: dict[int, bytes] = {}
    for place, record in records.items():
        for name, why in record.ignored.items():
            reason = why.reason
            counted = folders if why.folder else files
            counted[reason] = counted.get(reason, 0) + 1
            sizes[reason] = sizes.get(reason, 0) + why.size
            examples.setdefault(reason, entry_path(place, name))
    found = [
        LeftOut(reasons[reason], files.get(reason, 0), folders.get(reason, 0), sizes[reason], example)
        for reason, example in examples.items()
    ]
    return sorted(found, key=lambda each: (-each.bytes, -each.folders, -each.files, each.source))


def largest_folders(own: Mapping[bytes, tuple[int, int]]) -> list[FolderSize]:
    """Return the folders with the most bytes. A subfolder with most of its parent's bytes replaces the parent.

    Args:
        own: the number and bytes of the files directly in each folder.
    """
    totals: dict[bytes, list[int]] = {}
    for path, (files, size) in own.items():
        at = path
        while True:
            total = totals.setdefault(at, [0, 0])
            total[0] += files
            total[1] += size
            if not at:
                break
            at = at.rpartition(b"/")[0]
    below: dict[bytes, int] = {}  # the bytes of the largest subfolder
    for path, (_, size) in totals.items():
        if path:
            parent = path.rpartition(b"/")[0]
            below[parent] = max(below.get(parent, 0), size)
    chosen = [
        FolderSize(path, files, size)
        for path, (files, size) in totals.items()
        if size and below.get(path, 0) < 0.8 * size and (path or len(totals) == 1)
    ]
    return sorted(chosen, key=lambda each: (-each.bytes, each.path))[:_NAMED]


def _size(size: int) -> str:
    return memory(size) if size >= 1_000_000 else text_size(size)


def _amount(each: LeftOut) -> str:
    parts: list[str] = []
    if each.folders:
        parts.append("1 folder" if each.folders == 1 else f"{each.folders:,} folders")
    if each.files:
        parts.append(f"{'1 file' if each.files == 1 else f'{each.files:,} files'} ({_size(each.bytes)})")
    return ", ".join(parts)
