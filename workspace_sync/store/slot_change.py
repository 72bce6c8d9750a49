"""Change one slot from its current tree to another one.

Files that leave the slot are moved into the objects. Each file of the new tree is created from content of this host, if
possible; the rest is reported as missing, and ``put`` writes it directly to its place. Until the change is finished or
abandoned, the slot's record marks it as being changed. If the process is killed, the slot is therefore examined before
it is used again.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workspace_sync.model.errors import StoreError, TamperedError
from workspace_sync.model.manifest import FileEntry, Folder, Manifest, changes, digest_of, entry_path, printable
from workspace_sync.store.early_tree import EarlyTree
from workspace_sync.store.examination import HeldManifest, without
from workspace_sync.store.kept import Keeper, open_files, resolved
from workspace_sync.store.objects import Facts, copy, digest_of_file, reflink, umask, write_all
from workspace_sync.store.records import ExplainedErrors, explain
from workspace_sync.store.sources import ContentLocation, Sources
from workspace_sync.store.tree import Descriptor, TreeFolder

if TYPE_CHECKING:
    from workspace_sync.environment.rewriter import Rewriter

#: The number of threads that create files from other trees, and the number of files that one of them takes at a time.
_THREADS = min(4, len(os.sched_getaffinity(0)))
_BATCH = 64
#: The interval of checks whether to stop (seconds).
_ASKED = 0.02


@dataclass(frozen=True, slots=True)
class _Want:
    """The place of a missing piece."""

    path: bytes
    entry: FileEntry
    offset: int
    size: int


class SlotChange:
    """Change of one slot: ``begin``, then ``put`` from any thread, then ``finish`` or ``abandon``.

    Args:
        part: of the workspace.
        tree: the slot.
        have: its exact content.
        target: its new content; ``rewritten`` of it is filled in.
        sources: the content of this host.
        facts: of the file system.
        keeper: keeps paths created by ranks that conflict with the new tree.
        rewriter: for files of an environment that contain its prefix.
        discards: returns whether a file that leaves, by digest, need not become an object.
        early: content that is already in the slot, because it was sent before there was a manifest.
    """

    def __init__(
        self,
        part: str,
        tree: TreeFolder,
        have: HeldManifest,
        target: HeldManifest,
        sources: Sources,
        facts: Facts,
        keeper: Keeper,
        rewriter: Rewriter | None = None,
        discards: Callable[[bytes], bool] = lambda digest: False,
        early: EarlyTree | None = None,
    ) -> None:
        self.part = part
        self.tree = tree
        self.have = have
        self.target = target
        self.sources = sources
        self._facts = facts
        self._keeper = keeper
        self._rewriter = rewriter
        self._discards = discards
        self._early = early
        self._lock = threading.Lock()
        self._wants: dict[bytes, list[_Want]] = {}
        #: Files of the target that are missing so far, and files created by this change.
        self._pending: dict[bytes, FileEntry] = {}
        self._made: list[bytes] = []
        #: Large files with present pieces, which are finished when they are complete.
        self._partly: dict[bytes, FileEntry] = {}
        #: Files with hashes of other files, which are created after those, with their content at the client.
        self._indexes: dict[bytes, tuple[FileEntry, bytes]] = {}
        #: Folders of the slot without write permission.
        self._closed = {path for path, folder in have.manifest.folders.items() if folder.mode & 0o300 != 0o300}
        self._touched: set[bytes] = set()
        self._freed: set[bytes] = set()
        #: Changed modules, by folder: the stems of their names.
        self._stems: dict[bytes, set[bytes]] = {}
        #: Files of the slot that processes have open, once determined.
        self._open: set[bytes] | None = None
        self._umask = umask()
        self.reused = 0

    @property
    def files(self) -> int:
        """The number of created files."""
        return len(self._made)

    def missing(self) -> list[tuple[bytes, int]]:
        """Return the (digest, size) of each piece that this host does not have."""
        with self._lock:
            return [(digest, wants[0].size) for digest, wants in self._wants.items()]

    # -- the change, without missing content ---------------------------------------------------------

    def begin(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Remove old entries, create folders and links, and create each file whose content this host has.

        Args:
            stopped: checked between files; true: skip the rest. Such a change can only be abandoned.

        Raises:
            StoreError: this host cannot store the tree. If the reason is a name or the space, nothing was changed.
        """
        removed: list[tuple[bytes, FileEntry | bytes | int]] = []
        folders: list[bytes] = []
        links: list[tuple[bytes, bytes]] = []
        files: list[tuple[bytes, FileEntry]] = []
        inside: list[tuple[bytes, FileEntry, FileEntry]] = []
        for change in changes(self.have.manifest, self.target.manifest):
            path, old, new = change.path, change.old, change.new
            self._touch(path, isinstance(new, int))
            if isinstance(old, FileEntry) and isinstance(new, FileEntry):
                if self._only_mode(path, old, new):
                    continue
                if self._mostly_same(path, old, new):
                    inside.append((path, old, new))
                    continue
            if old is not None and not (isinstance(old, int) and isinstance(new, int)):
                removed.append((path, old))
            if isinstance(new, int):
                if old is None and path:
                    folders.append(path)
            elif isinstance(new, bytes):
                links.append((path, new))
            elif new is not None:
                files.append((path, new))
        for path, content in self.have.rewritten.items():
            before, after = self.have.manifest.file(path), self.target.manifest.file(path)
            if before and after and (before.digest, before.rewrite) == (after.digest, after.rewrite):
                self.target.rewritten[path] = content
        self._check_names([*folders, *(path for path, _ in links), *(path for path, _ in files)])
        self._check_space(removed, files, 0 if self._early is None else self._early.settle(self.target.manifest))
        for path in self._touched:
            if path in self.have.manifest.folders:
                with self._explain(path):
                    self.tree.folder(path)  # it was not replaced by something else
        self._pending = {**dict(files), **{path: new for path, _, new in inside}}
        for path, old in removed:
            self._remove(path, old)
        for path in folders:
            self._make_folder(path)
        for path, target in links:
            with self._explain(path):
                self._create(path, lambda folder, name, target=target: os.symlink(target, name, dir_fd=folder))
        self._make_files(files, inside, stopped)
        for path, _ in [*files, *((path, new) for path, _, new in inside)]:
            self._note_module(path)
        self._remove_compiled(list(self._stems))

    def _explain(self, path: bytes) -> ExplainedErrors:
        return explain(self.tree.path, path)

    def _touch(self, path: bytes, is_folder: bool) -> None:
        """Record folders whose mode and time will be set at the end."""
        if not is_folder:
            path = path.rpartition(b"/")[0]
        while path not in self._touched:
            self._touched.add(path)
            path = path.rpartition(b"/")[0]

    def _only_mode(self, path: bytes, old: FileEntry, new: FileEntry) -> bool:
        """Change the mode of a file in place, if nothing else differs and no other tree shares the file."""
        if (old.digest, old.rewrite) != (new.digest, new.rewrite):
            return False
        with self._explain(path):
            about = self.tree.stat(path)
            if about is None or not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
                return False
            with Descriptor(self.tree.open_file(path)) as fd:
                os.fchmod(fd, self.target.mode(new))
        return True

    def _mostly_same(self, path: bytes, old: FileEntry, new: FileEntry) -> bool:
        """Return whether most of a large file stays in place, so that it is best changed in place."""
        if not old.chunks or not new.chunks or old.rewrite or new.rewrite:
            return False
        if 2 * sum(size for _, _, size in set(old.pieces()) & set(new.pieces())) < new.size:
            return False
        if self._facts.reflink:
            return True
        if self._open is None:
            self._open = open_files(resolved(self.tree.fd))
        about = self.tree.stat(path)
        return (
            b"%b/%b" % (resolved(self.tree.fd), path) not in self._open  # a rank may have mapped it
            and about is not None
            and stat.S_ISREG(about.st_mode)
            and about.st_nlink == 1
            and (about.st_mtime_ns, about.st_size) == (old.mtime, old.size)
        )

    def _check_names(self, new: list[bytes]) -> None:
        """Refuse names that this file system cannot store, before anything is changed."""
        longest = self._facts.longest
        for path in new:
            name = path.rpartition(b"/")[2]
            whole = b"/%b/" % path
            if b"//" in whole or b"/./" in whole or b"/../" in whole or b"\0" in whole:
                raise StoreError(f"{self.tree.path}: {printable(path)!r} is no path of a file")
            if len(name) > longest:
                raise StoreError(
                    f"{self.tree.path}/{printable(path)}: the name has {len(name)} bytes, and this file system takes "
                    f"{longest}: shorten it, or ignore it"
                )
        if self._facts.case_insensitive:
            for path in {path.rpartition(b"/")[0] for path in new}:
                self._check_case(path, self.target.manifest.folders[path])

    def _check_case(self, path: bytes, folder: Folder) -> None:
        seen: dict[str, bytes] = {}
        for name in (*folder.files, *folder.links, *folder.folders):
            other = seen.setdefault(printable(name).casefold(), name)
            if other is not name:
                raise StoreError(
                    f"{self.tree.path}/{printable(path)}: {printable(other)!r} and {printable(name)!r} are one name on "
                    "this host, whose file system ignores case: rename one of them, or ignore it"
                )

    def _check_space(
        self, removed: list[tuple[bytes, FileEntry | bytes | int]], files: list[tuple[bytes, FileEntry]], there: int
    ) -> None:
        """Refuse a tree that is too large for the disk, before anything is changed. Files that only move need no space.

        Args:
            there: the size of files that are already in their places (bytes).
        """
        if self._facts.reflink:
            return
        moving = {old.digest for _, old in removed if isinstance(old, FileEntry)}
        if any(isinstance(old, int) for _, old in removed):
            moving |= {entry.digest for _, entry in self.have.manifest.files()}
        needed = sum(entry.size for _, entry in files if entry.digest not in moving) - there
        about = os.fstatvfs(self.tree.fd)
        free = about.f_bavail * about.f_frsize
        if needed > free:
            raise StoreError(
                f"{self.tree.path}: No space left on device (the new files take {needed} bytes, and {free} are free: "
                "free some space, or name a folder elsewhere in MONARCH_KERNEL_SYNC_FOLDER)"
            )

    # -- removal ---------------------------------------------------------------------------------------

    def _remove(self, path: bytes, old: FileEntry | bytes | int) -> None:
        with self._explain(path):
            self._writable(path.rpartition(b"/")[0])
            if isinstance(old, FileEntry):
                self._remove_file(path, old)
            elif isinstance(old, bytes):
                about = self.tree.stat(path)
                if about is not None and stat.S_ISLNK(about.st_mode):
                    self.tree.unlink(path)
                elif about is not None:
                    self._keeper.keep(self.part, self.tree, path)
            else:
                self._remove_folder(path)

    def _remove_folder(self, path: bytes) -> None:
        """Remove everything below a folder that the manifest lists, and the folder. Other files there are kept."""
        folder = self.have.manifest.folders[path]
        for name in folder.folders:
            self._remove(entry_path(path, name), 0)
        for name, target in folder.links.items():
            self._remove(entry_path(path, name), target)
        for name, entry in folder.files.items():
            self._remove(entry_path(path, name), entry)
        self._remove_compiled([path])
        cache = entry_path(path, b"__pycache__")
        if self.tree.stat(cache) is not None:
            self.tree.remove_folder(cache)
        if not self.tree.remove_folder(path):
            self._keeper.keep(self.part, self.tree, path)

    def _remove_file(self, path: bytes, entry: FileEntry) -> None:
        self._note_module(path)
        about = self.tree.stat(path)
        if about is None:
            return
        content = self.have.content(path, entry)
        if not stat.S_ISREG(about.st_mode) or content is None or not self._is_ours(path, entry, content, about):
            self._keeper.keep(self.part, self.tree, path)
            return
        folder, name = self.tree.place(path)
        if content[1] == 0 or self._discards(content[0]):
            os.unlink(name, dir_fd=folder)
            return
        self.sources.objects.take_in(content[0], folder, name)
        self.sources.object_made(content[0])
        self._freed.add(content[0])

    def _is_ours(self, path: bytes, entry: FileEntry, content: tuple[bytes, int], about: os.stat_result) -> bool:
        """Return whether a file matches the manifest, by its size and time, or else by its content."""
        if about.st_size != content[1]:
            return False
        if about.st_mtime_ns == entry.mtime:
            return True
        with Descriptor(self.tree.open_file(path)) as fd:
            return digest_of_file(fd) == content[0]

    def _note_module(self, path: bytes) -> None:
        if path.endswith(b".py"):
            folder, _, name = path.rpartition(b"/")
            self._stems.setdefault(folder, set()).add(name[:-3])

    def _remove_compiled(self, folders: Iterable[bytes]) -> None:
        """Remove the compiled files of changed modules: the size and time in them might also match the new source."""
        for folder in folders:
            stems = self._stems.pop(folder, None)
            cache = entry_path(folder, b"__pycache__")
            if not stems:
                continue
            try:
                names = self.tree.names(cache)
            except OSError:
                continue
            ours: set[bytes] = set()
            for held in (self.have, self.target):
                if (known := held.manifest.folders.get(cache)) is not None:
                    ours.update(known.files)
            with self._explain(cache):
                for name in names:
                    if name.partition(b".")[0] in stems and name.endswith(b".pyc") and name not in ours:
                        self.tree.unlink(entry_path(cache, name))

    # -- folders, links, files --------------------------------------------------------------------------

    def _make_folder(self, path: bytes) -> None:
        with self._explain(path):
            about = self.tree.stat(path)
            if about is not None and stat.S_ISDIR(about.st_mode):
                return  # it contains files of ranks, or caches
            self._create(path, lambda folder, name: os.mkdir(name, 0o700, dir_fd=folder))

    def _create(self, path: bytes, create: Callable[[int, bytes], object]) -> None:
        """Create an entry; if a rank has created something in its place, that is kept elsewhere."""
        self._writable(path.rpartition(b"/")[0])
        try:
            create(*self.tree.place(path))
        except FileExistsError:
            self._keeper.keep(self.part, self.tree, path)
            create(*self.tree.place(path))

    def _writable(self, path: bytes) -> None:
        """Make a folder writable; its mode is restored at the end."""
        if path in self._closed:
            fd = self.tree.folder(path)
            if os.fstat(fd).st_mode & 0o300 != 0o300:
                os.fchmod(fd, self.have.manifest.folders[path].mode | 0o700)

    def _new_file(self, path: bytes, entry: FileEntry, *, unfinished: bool = False) -> int:
        """Create a file with its mode. An `unfinished` file can be reopened for writing until it is complete."""
        mode = self.target.mode(entry) | (0o200 if unfinished else 0)
        self._writable(path.rpartition(b"/")[0])
        try:
            fd = self.tree.new_file(path, mode)
        except FileExistsError:
            self._keeper.keep(self.part, self.tree, path)
            fd = self.tree.new_file(path, mode)
        if mode & self._umask:
            os.fchmod(fd, mode)
        return fd

    def _done(self, path: bytes) -> None:
        del self._pending[path]
        self._made.append(path)

    # -- content of this host -------------------------------------------------------------------------------

    def _make_files(
        self,
        files: list[tuple[bytes, FileEntry]],
        inside: list[tuple[bytes, FileEntry, FileEntry]],
        stopped: Callable[[], bool],
    ) -> None:
        """Create the files whose content this host has, and record the missing content of the others."""
        self.sources.expect(len(files))
        for held in (self.target, self.have, *(donor.held for donor in self.sources.donors)):
            self.sources.learn(held)
        stopped = _seldom(stopped)
        rest = self._make_near(files, stopped)
        if stopped():
            return
        wanted: set[bytes] = set()
        for entry in [*(entry for _, entry in rest), *(new for _, _, new in inside)]:
            content = self.sources.content(entry)
            if content is not None:
                wanted.add(content[0])
            wanted.add(entry.digest)
            wanted.update(entry.chunks)
        if wanted:
            self.sources.locate(wanted, {entry.digest: entry.size for _, entry in rest})
        for path, entry in rest:
            if stopped():
                return
            with self._explain(path):
                self._from_far(path, entry)
        for path, old, new in inside:
            if stopped():
                return
            with self._explain(path):
                if not self._facts.reflink:
                    self._change_inside(path, old, new)
                elif not self._from_clone(path, old, new):
                    self._from_far(path, new)

    def _make_near(
        self, files: list[tuple[bytes, FileEntry]], stopped: Callable[[], bool]
    ) -> list[tuple[bytes, FileEntry]]:
        """Call ``_from_near`` for all files; return those that could not be created."""

        def some(part: list[tuple[bytes, FileEntry]]) -> list[tuple[bytes, FileEntry]]:
            rest: list[tuple[bytes, FileEntry]] = []
            for path, entry in part:
                if stopped():
                    break
                with self._explain(path):
                    if not self._from_near(path, entry):
                        rest.append((path, entry))
            return rest

        if len(files) <= _BATCH or not self.sources.donors:
            return some(files)
        with ThreadPoolExecutor(_THREADS, "sync files") as pool:
            parts = pool.map(some, [files[i : i + _BATCH] for i in range(0, len(files), _BATCH)])
            return [each for part in parts for each in part]

    def _from_near(self, path: bytes, entry: FileEntry) -> bool:
        """Create a file from one that has just left the slot, from the same path of another tree, or from an object."""
        if entry.size == 0:
            fd = self._new_file(path, entry)
            os.utime(fd, ns=(entry.mtime, entry.mtime))
            os.close(fd)
            self._done(path)
            return True
        if self._early is not None and self._early.adopt(path, entry):
            self._done(path)
            return True
        content = self.sources.content(entry)
        if content is None:
            return False
        if content[0] in self._freed and self._take_back(path, entry, content):
            return True
        for place in self.sources.near(path, content):
            if self._from_tree(path, entry, content, place):
                return True
        fd = self.sources.open_object(content[0])
        if fd is None:
            return False
        with Descriptor(fd):
            if self._copied(path, entry, content, fd):
                return True
        self.sources.damaged_object(content[0])
        return False

    def _take_back(self, path: bytes, entry: FileEntry, content: tuple[bytes, int]) -> bool:
        """Move a file that has just left this slot to its new place."""
        fd = self.sources.objects.open(content[0])
        if fd is None:
            return False
        with Descriptor(fd):
            if os.fstat(fd).st_nlink > 1 or digest_of_file(fd) != content[0]:
                return False
            self._freed.discard(content[0])
            try:
                self._create(path, lambda folder, name: self.sources.objects.give_back(content[0], folder, name))
            except FileNotFoundError:
                return False  # another process has just collected it
            os.fchmod(fd, self.target.mode(entry))
            os.utime(fd, ns=(entry.mtime, entry.mtime))
        self._reused(path, entry, content)
        return True

    def _from_tree(self, path: bytes, entry: FileEntry, content: tuple[bytes, int], place: ContentLocation) -> bool:
        """Create a file from a file of another tree: by a hard link if that is safe, else from its content."""
        try:
            fd = place.donor.tree.open_file(place.path)
        except OSError:
            self.sources.damaged(place)
            return False
        with Descriptor(fd):
            if self._linked(path, entry, content, place, fd) or self._copied(path, entry, content, fd):
                return True
        self.sources.damaged(place)
        return False

    def _linked(
        self, path: bytes, entry: FileEntry, content: tuple[bytes, int], place: ContentLocation, fd: int
    ) -> bool:
        """Create a file as a hard link to one of another tree if both are read-only; return whether it was created."""
        if not self.target.read_only or not place.donor.held.read_only:
            return False
        about = os.fstat(fd)
        if (stat.S_IMODE(about.st_mode), about.st_mtime_ns) != (self.target.mode(entry), entry.mtime):
            return False
        if digest_of_file(fd) != content[0]:
            return False
        source, old = place.donor.tree.place(place.path)
        try:
            self._create(
                path,
                lambda folder, name: os.link(old, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False),
            )
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            return False  # another file system, or too many links
        self._reused(path, entry, content)
        return True

    def _copied(self, path: bytes, entry: FileEntry, content: tuple[bytes, int], source: int) -> bool:
        """Create a file from an open one; return False if that has unexpected content."""
        fd = self._new_file(path, entry)
        try:
            ours = copy(source, fd, content[1], shares=self._facts.reflink) == content[0]
            if ours:
                os.utime(fd, ns=(entry.mtime, entry.mtime))
        except BaseException:
            self.tree.unlink(path)
            raise
        finally:
            os.close(fd)
        if not ours:
            self.tree.unlink(path)
            return False
        self._reused(path, entry, content)
        return True

    def _reused(self, path: bytes, entry: FileEntry, content: tuple[bytes, int]) -> None:
        with self._lock:
            self.reused += content[1]
        if entry.rewrite is not None:
            self.target.rewritten[path] = content
        self._done(path)

    def _from_far(self, path: bytes, entry: FileEntry) -> None:
        """Create a file from its content or pieces of it, wherever they are; record the missing pieces."""
        content = self.sources.content(entry)
        place = self.sources.place(content[0]) if content is not None else None
        if content is None or place is None or not self._is_whole(place, content):
            pass
        elif self._from_tree(path, entry, content, place):
            return
        if not entry.chunks:
            data = self.sources.piece(entry.digest, entry.size)
            if data is None:
                self._want(entry.digest, _Want(path, entry, 0, entry.size))
            else:
                self._write(path, entry, data)
                self.reused += len(data)
            return
        fd = self._new_file(path, entry, unfinished=True)
        self._partly[path] = entry
        with Descriptor(fd):
            os.ftruncate(fd, entry.size)
            for digest, offset, size in entry.pieces():
                self._fill(fd, path, entry, digest, offset, size)

    def _is_whole(self, place: ContentLocation, content: tuple[bytes, int]) -> bool:
        entry = place.donor.held.manifest.file(place.path)
        return entry is not None and place.donor.held.content(place.path, entry) == content

    def _fill(self, fd: int, path: bytes, entry: FileEntry, digest: bytes, offset: int, size: int) -> None:
        """Write one piece of a large file, or record that it is missing."""
        data = self.sources.piece(digest, size)
        if data is None:
            self._want(digest, _Want(path, entry, offset, size))
        else:
            write_all(fd, data, offset)
            self.reused += size

    def _want(self, digest: bytes, want: _Want) -> None:
        self._wants.setdefault(digest, []).append(want)

    def _from_clone(self, path: bytes, old: FileEntry, new: FileEntry) -> bool:
        """Create a large file from one that has left the slot and shares most bytes; return whether it was created."""
        self._remove_file(path, old)
        if self._from_near(path, new):
            return True
        source = self.sources.objects.open(old.digest)
        if source is None:
            return False
        with Descriptor(source), Descriptor(self._new_file(path, new)) as fd:
            shares = reflink(source, fd)
        if shares:
            self._change_inside(path, old, new)
        else:
            self.tree.unlink(path)
        return shares

    def _change_inside(self, path: bytes, old: FileEntry, new: FileEntry) -> None:
        """Change pieces of a large file in place. Replaced pieces first become objects, so that a rollback finds them.

        If files can share bytes, the whole earlier file already is an object.
        """
        self._writable(path.rpartition(b"/")[0])
        unfinished = self.target.mode(new) | 0o200
        with Descriptor(self.tree.open_file(path)) as fd:
            os.fchmod(fd, unfinished)  # users other than root cannot open a read-only file for writing
        with Descriptor(self.tree.reopen(path)) as fd:
            self._partly[path] = new
            stays = set(old.pieces()) & set(new.pieces())

            def intact(piece: tuple[bytes, int, int]) -> bool:
                digest, offset, size = piece
                data = os.pread(fd, size, offset)
                if digest_of(data) != digest:
                    return False
                if piece not in stays and not self._facts.reflink:
                    self.sources.objects.write(digest, data)
                    self.sources.object_made(digest)
                return True

            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                pieces = list(old.pieces())
                good = {piece for piece, is_good in zip(pieces, pool.map(intact, pieces)) if is_good}
            for digest, offset, size in new.pieces():
                if (digest, offset, size) in good:
                    self.reused += size
                else:
                    self._fill(fd, path, new, digest, offset, size)
            os.ftruncate(fd, new.size)

    # -- received content --------------------------------------------------------------------------------

    def put(self, digest: bytes, data: memoryview) -> None:
        """Write a verified piece wherever it is missing.

        Raises:
            StoreError: it cannot be written.
        """
        with self._lock:
            wants = self._wants.pop(digest, None)
        if wants is None:
            return
        done = 0
        try:
            for want in wants:
                with self._explain(want.path):
                    if want.entry.chunks:
                        with Descriptor(self.tree.reopen(want.path)) as fd:
                            write_all(fd, data, want.offset)
                    else:
                        self._write(want.path, want.entry, data)
                done += 1
        except BaseException:
            with self._lock:
                self._wants[digest] = wants[done:]
            raise

    def _write(self, path: bytes, entry: FileEntry, data: memoryview | bytes, *, last: bool = False) -> None:
        """Create a file from its complete content at the client."""
        if entry.rewrite is not None:
            if entry.rewrite.files and not last:
                with self._lock:
                    self._indexes[path] = entry, bytes(data)
                return
            data = self._rewritten(path, entry, bytes(data))
        fd = self._new_file(path, entry)
        try:
            with Descriptor(fd):
                write_all(fd, data, 0)
                os.utime(fd, ns=(entry.mtime, entry.mtime))
        except BaseException:
            self.tree.unlink(path)
            raise
        self._done(path)

    def _rewritten(self, path: bytes, entry: FileEntry, data: bytes) -> bytes:
        if self._rewriter is None:
            raise StoreError(
                f"{self.tree.path}/{printable(path)} names the prefix of its environment, and no rewriter was given: "
                "sync the environment from its client"
            )
        result = self._rewriter(entry, data, path=path, read=self._made_content)
        self.target.rewritten[path] = digest_of(result), len(result)
        return result

    def _made_content(self, path: bytes) -> bytes:
        """Return the content of a file that was created."""
        with os.fdopen(self.tree.open_file(path), "rb") as file:
            return file.read()

    # -- finish and abandon ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Complete the tree: large files, modes and times.

        Raises:
            StoreError: pieces are missing, or something cannot be written.
        """
        with self._lock:
            left = sum(map(len, self._wants.values()))
            one = next(iter(self._wants.values()))[0].path if left else b""
        if left:
            raise StoreError(
                f"{self.tree.path}: {left} pieces have not arrived, among them one of {printable(one)}: sync again"
            )
        for path, entry in list(self._partly.items()):
            with self._explain(path):
                self._finish_large(path, entry)
        for path, (entry, data) in list(self._indexes.items()):
            with self._explain(path):
                self._write(path, entry, data, last=True)
                del self._indexes[path]
        if self._pending:
            raise StoreError(f"{self.tree.path}/{printable(next(iter(self._pending)))} was not made: sync again")
        self._finish_folders(self.target.manifest)

    def _finish_folders(self, manifest: Manifest) -> None:
        for path in self._touched:
            if path in manifest.folders:
                with self._explain(path):
                    self.tree.finish_folder(path, manifest.folders[path])

    def _finish_large(self, path: bytes, entry: FileEntry) -> None:
        # Its digest is not computed again: each chunk was hashed before it was written at its offset, or in place; the
        # manifest's chunks cover the file without gaps; and the client hashed file and chunks from the same bytes. A
        # verification finds concurrent writes by other processes, as in every other file.
        with Descriptor(self.tree.open_file(path)) as fd:
            if (size := os.fstat(fd).st_size) != entry.size:
                raise StoreError(
                    f"{self.tree.path}/{printable(path)} has {size} bytes, and {entry.size} were written: another "
                    "process has changed it while it was made; sync again"
                )
            if entry.rewrite is not None:
                with os.fdopen(os.dup(fd), "rb") as file:
                    data = file.read()
                self.tree.unlink(path)
                self._write(path, entry, data)
            else:
                os.fchmod(fd, self.target.mode(entry))
                os.utime(fd, ns=(entry.mtime, entry.mtime))
                self._done(path)
        del self._partly[path]

    def abandon(self, *, keep_made: bool) -> HeldManifest:
        """Stop the change in its current state; return the content of the slot.

        Args:
            keep_made: keep the created files; otherwise they are removed, so that nothing stays staged.

        Raises:
            StoreError: something cannot be removed.
        """
        for path in list(self._partly):
            with self._explain(path):
                if keep_made and not self._is_wanted(path):
                    self._finish_large(path, self._partly[path])
                else:
                    self.tree.unlink(path)
        self._partly.clear()
        lacking = set(self._pending)
        if not keep_made:
            for path in self._made:
                with self._explain(path):
                    self._writable(path.rpartition(b"/")[0])
                    self.tree.unlink(path)
            lacking.update(self._made)
            self._made.clear()
        left = without(self.target, lacking)
        self._touched.update(_above(lacking))
        self._finish_folders(left.manifest)
        return left

    def _is_wanted(self, path: bytes) -> bool:
        return any(want.path == path for wants in self._wants.values() for want in wants)


def _above(paths: Iterable[bytes]) -> Iterator[bytes]:
    """Iterate over the folders of some paths, and their parents."""
    for path in paths:
        while path:
            path = path.rpartition(b"/")[0]
            yield path


def verified(digest: bytes, data: memoryview) -> None:
    """Verify a received piece.

    Raises:
        TamperedError: it does not match its digest.
    """
    if digest_of(data) != digest:
        raise TamperedError(
            f"a piece of {len(data)} bytes is not {digest.hex()[:12]} as it should be: it is sent again"
        )


def _seldom(stopped: Callable[[], bool]) -> Callable[[], bool]:
    """Rate-limit a check: call it only a few times a second until it returns true."""
    since = 0.0
    answer = False

    def ask() -> bool:
        nonlocal since, answer
        now = time.monotonic()
        if not answer and now - since > _ASKED:
            since = now
            answer = stopped()
        return answer

    return ask
