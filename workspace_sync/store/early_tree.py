"""Fill a slot with the content of a first sync before there is a manifest.

The record of such a slot is marked (``EARLY``) until there is a manifest. No rank has ever seen the slot, so all its
content came from the client. If a killed process has left such a slot, it is emptied, and its content becomes objects,
so that it is not sent again.
"""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import dataclass, field

from workspace_sync.model.errors import StoreError, TamperedError
from workspace_sync.model.manifest import DIGEST_SIZE, EarlyFile, FileEntry, Manifest, digest_of, entry_path, printable
from workspace_sync.store.objects import Objects, digest_of_file, umask, write_all
from workspace_sync.store.records import explain
from workspace_sync.store.tree import Descriptor, TreeFolder

#: The target in the record of such a slot.
EARLY = b"\xff" * DIGEST_SIZE
#: Larger files are kept as pieces of this size, as a client cuts files that it has not seen before (bytes).
_PIECE = 1 << 20


@dataclass(slots=True)
class _Arrived:
    """The received pieces of a file: (digest, size) by offset."""

    size: int
    mode: int
    mtime: int
    pieces: dict[int, tuple[bytes, int]] = field(default_factory=dict[int, tuple[bytes, int]])

    def note(self, file: EarlyFile) -> None:
        """Record written pieces."""
        offset = file.offset
        for digest, size in zip(file.digests, file.sizes, strict=True):
            self.pieces[offset] = digest, size
            offset += size


class EarlyTree:
    """Files written as they arrive, in any order and from any thread. A ``SlotChange`` then adopts them.

    Attributes:
        slot: its name.
        tree: the slot, which is new.

    Args:
        longest: the maximum length of a name in the file system (bytes). Files with longer names are not written.
    """

    def __init__(self, slot: str, tree: TreeFolder, longest: int) -> None:
        self.slot = slot
        self.tree = tree
        self._longest = longest
        self._files: dict[bytes, _Arrived] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._umask = umask()

    # -- received content ------------------------------------------------------------------------------------

    def put(self, file: EarlyFile, data: memoryview) -> None:
        """Write a file, or chunks of one.

        Raises:
            TamperedError: it does not match its digests.
            StoreError: it cannot be written, or its path leads out of the tree.
        """
        at = 0
        for digest, size in zip(file.digests, file.sizes, strict=True):
            if digest_of(data[at : at + size]) != digest:
                raise TamperedError(f"a piece of {printable(file.path)} is not what it should be: it is sent again")
            at += size
        if self._closed:
            return
        names = file.path.split(b"/")
        if b"" in names or b"." in names or b".." in names or b"\0" in file.path:
            raise StoreError(f"{self.tree.path}: {printable(file.path)!r} is no path of a file")
        if any(len(name) > self._longest for name in names):
            return  # the change to the manifest reports this
        with explain(self.tree.path, file.path):
            if file.whole:
                self._write_whole(file, data)
            else:
                self._write_part(file, data)

    def _write_whole(self, file: EarlyFile, data: memoryview) -> None:
        with self._lock:
            if file.path in self._files:
                return  # sent again, because its first receiver was slow
            self._files[file.path] = found = _Arrived(file.size, file.mode, file.mtime)
        with Descriptor(self._create(file)) as fd:
            write_all(fd, data, 0)
            os.utime(fd, ns=(file.mtime, file.mtime))
        found.note(file)

    def _write_part(self, file: EarlyFile, data: memoryview) -> None:
        with self._lock:  # it covers only the creation of a file by its first part, and few files are large
            found = self._files.get(file.path)
            if found is None:
                found = self._files[file.path] = _Arrived(file.size, file.mode, file.mtime)
                fd = self._create(file)
            else:
                fd = self.tree.reopen(file.path)
        with Descriptor(fd):
            write_all(fd, data, file.offset)
        found.note(file)

    def _create(self, file: EarlyFile) -> int:
        mode = file.mode if file.whole else file.mode | 0o200  # further parts of a large file will be written
        try:
            fd = self.tree.new_file(file.path, mode)
        except FileNotFoundError:
            self.tree.make_folders(file.path.rpartition(b"/")[0])
            fd = self.tree.new_file(file.path, mode)
        if mode & self._umask:
            os.fchmod(fd, mode)
        return fd

    def read(self, path: bytes, offset: int, into: memoryview) -> bool:
        """Read back the received content; return whether it is complete."""
        try:
            fd = self.tree.open_file(path)
        except OSError:
            return False
        with Descriptor(fd):
            return os.preadv(fd, [into], offset) == len(into)

    def close(self) -> None:
        """Stop writing: later content is a duplicate. No thread may be writing."""
        self._closed = True

    # -- adoption by the manifest ---------------------------------------------------------------------------

    def settle(self, manifest: Manifest) -> int:
        """Remove content that differs from the manifest, because it has changed since it was read.

        Returns:
            The bytes of the files that stay, for ``adopt``.
        """
        stay = 0
        for path, found in list(self._files.items()):
            entry = manifest.file(path)
            if entry is not None and _fits(found, entry):
                stay += entry.size
                continue
            del self._files[path]
            with explain(self.tree.path, path):
                self.tree.unlink(path)
                while path := path.rpartition(b"/")[0]:
                    if not self.tree.remove_folder(path):
                        break
        return stay

    def adopt(self, path: bytes, entry: FileEntry) -> bool:
        """Return whether a file is here; if so, make it part of the tree, with its mode and time."""
        found = self._files.pop(path, None)
        if found is None:
            return False
        if entry.chunks or (found.mode, found.mtime) != (entry.mode, entry.mtime):
            with Descriptor(self.tree.open_file(path)) as fd:
                os.fchmod(fd, entry.mode)
                os.utime(fd, ns=(entry.mtime, entry.mtime))
        return True


def _fits(found: _Arrived, entry: FileEntry) -> bool:
    return (
        entry.rewrite is None
        and found.size == entry.size
        and found.pieces == {offset: (digest, size) for digest, offset, size in entry.pieces()}
    )


def emptied(tree: TreeFolder, objects: Objects | None) -> None:
    """Remove all content of a slot that no rank has seen.

    Args:
        objects: keep the content there, so that it is not sent again; None: delete it.
    """
    with explain(tree.path):
        _empty(tree, b"", objects)


def _empty(tree: TreeFolder, path: bytes, objects: Objects | None) -> None:
    for name in tree.names(path):
        inside = entry_path(path, name)
        about = tree.stat(inside)
        if about is not None and stat.S_ISDIR(about.st_mode):
            os.chmod(tree.folder(inside), 0o700)
            _empty(tree, inside, objects)
            tree.remove_folder(inside)
            continue
        if objects is not None and about is not None and stat.S_ISREG(about.st_mode) and about.st_size:
            _keep(tree, inside, about.st_size, objects)
        tree.unlink(inside)


def _keep(tree: TreeFolder, path: bytes, size: int, objects: Objects) -> None:
    try:
        fd = tree.open_file(path)
    except PermissionError:
        return
    with Descriptor(fd):
        if size <= _PIECE:
            objects.take_in(digest_of_file(fd), *tree.place(path))
            return
        for offset in range(0, size, _PIECE):
            data = os.pread(fd, _PIECE, offset)
            if data.count(0) < len(data):  # not a piece that has not arrived yet
                objects.write(digest_of(data), data)
