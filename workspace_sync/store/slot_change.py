"""The change of one slot from the tree that it holds to another one: what it lacks, and how that gets in.

Files that leave the slot move into the objects. Each file of the new tree is made from what this host has, if possible;
the rest is named as missing, and ``put`` writes it straight into its place. Until ``finish``, the slot's record says
that it is being changed, so a process that is killed leaves a slot that is examined before it is used again.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from workspace_sync.model.errors import StoreError, TamperedError
from workspace_sync.model.manifest import FileEntry, Folder, changes, digest_of, printable, seal
from workspace_sync.store.cloning import Facts, copy, digest_of_file
from workspace_sync.store.examination import Held, Problem
from workspace_sync.store.failures import explain
from workspace_sync.store.kept import Keeper
from workspace_sync.store.objects import Objects, write_all
from workspace_sync.store.tree import Tree, join


class FileRewriter(Protocol):
    """Turns the content that a file of an environment has at the client into this host's."""

    def __call__(self, entry: FileEntry, data: bytes, *, path: bytes, read: Callable[[bytes], bytes]) -> bytes:
        """The content on this host.

        Args:
            entry: of the file.
            data: its content at the client.
            path: in the tree.
            read: gives the content on this host of each of ``entry.rewrite.files``, which are made before.
        """
        ...


_UMASK = 0o777


@dataclass(frozen=True)
class Donor:
    """A tree whose files may be used."""

    tree: Tree
    held: Held
    #: Whether a file that is not as its manifest says is worth a report (it may be changing in another workspace).
    steady: bool = True


@dataclass(frozen=True)
class _Want:
    """A place for a piece that is missing."""

    path: bytes
    entry: FileEntry
    offset: int


class SlotChange:
    """Change one slot; ``begin``, then ``put`` from any thread, then ``finish`` or ``abandon``.

    Args:
        part: of the workspace.
        tree: the slot.
        have: what it holds, exactly.
        target: what it shall hold.
        objects: of the store.
        facts: of its file system.
        keeper: takes what ranks have made where the new tree has something else.
        rewriter: for files of an environment that name its prefix.
        donors: other trees, those with likely the same files first.
        more_donors: called if that was not enough.
    """

    def __init__(
        self,
        part: str,
        tree: Tree,
        have: Held,
        target: Held,
        objects: Objects,
        facts: Facts,
        keeper: Keeper,
        rewriter: FileRewriter | None = None,
        donors: Sequence[Donor] = (),
        more_donors: Callable[[int], Sequence[Donor]] | None = None,
    ) -> None:
        self.part = part
        self.tree = tree
        self.have = have
        self.target = target
        self._objects = objects
        self._facts = facts
        self._keeper = keeper
        self._rewriter = rewriter
        self._donors = list(donors)
        self._more_donors = more_donors
        self._lock = threading.Lock()
        self._wants: dict[bytes, list[_Want]] = {}
        #: Files of the target that are not there (yet), and those that this change has made.
        self._pending: dict[bytes, FileEntry] = {}
        self._made: list[bytes] = []
        #: Large files with pieces that are there, to be finished when all are.
        self._partly: dict[bytes, FileEntry] = {}
        #: Files that hold hashes of others and are made after those, with their content at the client.
        self._indexes: dict[bytes, tuple[FileEntry, bytes]] = {}
        self._touched: set[bytes] = set()
        self._freed: set[bytes] = set()
        #: The compiled files of modules that change, by folder: the stems of their names.
        self._stems: dict[bytes, set[bytes]] = {}
        self.reused = 0
        self.problems: list[Problem] = []

    @property
    def files(self) -> int:
        """How many files were made."""
        return len(self._made)

    def missing(self) -> list[tuple[bytes, int]]:
        """The (digest, size) of each piece that this host does not have."""
        found: list[tuple[bytes, int]] = []
        for digest, wants in self._wants.items():
            entry, offset = wants[0].entry, wants[0].offset
            if not entry.chunks:
                found.append((digest, entry.size))
            else:
                found.append((digest, next(size for _, at, size in entry.pieces() if at == offset)))
        return found

    # -- the change, without what is missing ---------------------------------------------------------

    def begin(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Remove what goes, make folders and links, and make each file that this host has the content of.

        Args:
            stopped: asked between files; true: leave the rest missing.
        """
        removed: list[tuple[bytes, FileEntry | bytes | int]] = []
        folders: list[bytes] = []
        links: list[tuple[bytes, bytes]] = []
        files: list[tuple[bytes, FileEntry]] = []
        for change in changes(self.have.manifest, self.target.manifest):
            path, old, new = change.path, change.old, change.new
            self._touch(path, isinstance(new, int))
            if isinstance(old, FileEntry) and isinstance(new, FileEntry) and self._only_mode(path, old, new):
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
        self._check(folders, links, files)
        self._pending = dict(files)
        for path, old in removed:
            self._remove(path, old)
        self._remove_compiled()
        for path in folders:
            self._make_folder(path)
        for path, target in links:
            with self._explain(path):
                self._create(path, lambda folder, name, target=target: os.symlink(target, name, dir_fd=folder))
        self._reuse(files, stopped)

    def _explain(self, path: bytes):
        return explain(self.tree.path, path)

    def _touch(self, path: bytes, is_folder: bool) -> None:
        """Note folders whose mode and time are to be set in the end."""
        if not is_folder:
            path = path.rpartition(b"/")[0]
        while path not in self._touched:
            self._touched.add(path)
            if not path:
                break
            path = path.rpartition(b"/")[0]

    def _only_mode(self, path: bytes, old: FileEntry, new: FileEntry) -> bool:
        """Change the mode of a file in place, if nothing else differs and no other tree shares it."""
        if (old.digest, old.rewrite) != (new.digest, new.rewrite):
            return False
        with self._explain(path):
            about = self.tree.stat(path)
            if about is None or not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
                return False
            fd = self.tree.open_file(path)
            try:
                os.fchmod(fd, self.target.mode(new))
            finally:
                os.close(fd)
        if new.rewrite is not None and path in self.have.rewritten:
            self.target.rewritten[path] = self.have.rewritten[path]
        return True

    def _check(
        self, folders: list[bytes], links: list[tuple[bytes, bytes]], files: list[tuple[bytes, FileEntry]]
    ) -> None:
        """Refuse before anything is changed what this file system cannot hold."""
        longest = self._facts.longest
        new = [*folders, *(path for path, _ in links), *(path for path, _ in files)]
        for path in new:
            name = path.rpartition(b"/")[2]
            if len(name) > longest:
                raise StoreError(
                    f"{self.tree.path}/{printable(path)}: the name has {len(name)} bytes, and this file system takes "
                    f"{longest}: shorten it, or ignore it"
                )
            if not name or name in (b".", b"..") or b"\0" in name:
                raise StoreError(f"{self.tree.path}: {printable(path)!r} is no path of a file")
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
                    "this host, whose file system does not tell case apart: rename one of them, or ignore it"
                )

    # -- removal ---------------------------------------------------------------------------------------

    def _remove(self, path: bytes, old: FileEntry | bytes | int) -> None:
        with self._explain(path):
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
        """Remove all that the manifest names below a folder; what else is there stays, and the folder with it."""
        folder = self.have.manifest.folders[path]
        self._writable(path)
        for name, entry in folder.files.items():
            self._remove_file(join(path, name), entry)
        for name, target in folder.links.items():
            self._remove(join(path, name), target)
        for name in folder.folders:
            self._remove_folder(join(path, name))
        self._remove_compiled(path)
        if self.tree.stat(join(path, b"__pycache__")) is not None:
            self.tree.remove_folder(join(path, b"__pycache__"))
        self.tree.remove_folder(path)

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
        if content[1] == 0:
            os.unlink(name, dir_fd=folder)
            return
        self._objects.take_in(content[0], folder, name)
        self._freed.add(content[0])

    def _is_ours(self, path: bytes, entry: FileEntry, content: tuple[bytes, int], about: os.stat_result) -> bool:
        """Whether a file is as the manifest says; its times say so, else its content."""
        if about.st_size != content[1]:
            return False
        if about.st_mtime_ns == entry.mtime:
            return True
        fd = self.tree.open_file(path)
        try:
            return digest_of_file(fd) == content[0]
        finally:
            os.close(fd)

    def _note_module(self, path: bytes) -> None:
        if path.endswith(b".py"):
            folder, _, name = path.rpartition(b"/")
            self._stems.setdefault(folder, set()).add(name[:-3])

    def _remove_compiled(self, only: bytes | None = None) -> None:
        """Remove the compiled files of changed modules: the size and time in them may fit the new source, too."""
        for folder in [only] if only is not None else list(self._stems):
            stems = self._stems.pop(folder, None)
            cache = join(folder, b"__pycache__")
            if not stems:
                continue
            try:
                names = self.tree.names(cache)
            except OSError:
                continue
            known = self.have.manifest.folders.get(cache)
            for name in names:
                ours = known is not None and name in known.files
                if name.partition(b".")[0] in stems and name.endswith(b".pyc") and not ours:
                    self.tree.unlink(join(cache, name))

    # -- folders, links, files --------------------------------------------------------------------------

    def _make_folder(self, path: bytes) -> None:
        with self._explain(path):
            about = self.tree.stat(path)
            if about is not None and stat.S_ISDIR(about.st_mode):
                return  # it has files of ranks, or its caches
            self._create(path, lambda folder, name: os.mkdir(name, 0o700, dir_fd=folder))

    def _create(self, path: bytes, create: Callable[[int, bytes], object]) -> None:
        """Make an entry; what a rank has put in its place is kept elsewhere."""
        self._writable(path.rpartition(b"/")[0])
        try:
            create(*self.tree.place(path))
        except FileExistsError:
            self._keeper.keep(self.part, self.tree, path)
            create(*self.tree.place(path))

    def _writable(self, path: bytes) -> None:
        """See to it that entries of a folder can be changed; its mode is set again in the end."""
        before = self.have.manifest.folders.get(path)
        if before is not None and before.mode & 0o300 != 0o300:
            fd = self.tree.folder(path)
            if os.fstat(fd).st_mode & 0o300 != 0o300:
                os.fchmod(fd, before.mode | 0o700)

    def _new_file(self, path: bytes, entry: FileEntry) -> int:
        """Create a file with its mode."""
        mode = self.target.mode(entry)
        self._writable(path.rpartition(b"/")[0])
        try:
            fd = self.tree.new_file(path, mode)
        except FileExistsError:
            self._keeper.keep(self.part, self.tree, path)
            fd = self.tree.new_file(path, mode)
        if mode & _UMASK != mode or mode & ~_process_umask() != mode:
            os.fchmod(fd, mode)
        return fd

    def _done(self, path: bytes) -> None:
        del self._pending[path]
        self._made.append(path)

    # -- reuse ------------------------------------------------------------------------------------------

    def _reuse(self, files: list[tuple[bytes, FileEntry]], stopped: Callable[[], bool]) -> None:
        """Make the files of which this host has the content, and note what is missing of the others."""
        rest: list[tuple[bytes, FileEntry]] = []
        known = self._known_content()
        objects = self._objects.names() if len(files) > 256 else None
        for path, entry in files:
            with self._explain(path):
                self._note_module(path)
                if stopped():
                    return
                if entry.size == 0:
                    fd = self._new_file(path, entry)
                    os.utime(fd, ns=(entry.mtime, entry.mtime))
                    os.close(fd)
                    self._done(path)
                    continue
                content = self._content(path, entry, known)
                if content is None or not self._from_near(path, entry, content, objects):
                    rest.append((path, entry))
        self._remove_compiled()
        if not rest:
            return
        wanted: set[bytes] = set()
        for path, entry in rest:
            content = self._content(path, entry, known)
            if content is not None:
                wanted.add(content[0])
            wanted.add(entry.digest)
            if entry.chunks:
                wanted.update(entry.chunks)
        places = self._located(wanted)
        if self._more_donors is not None:
            lacking = sum(entry.size for _, entry in rest if entry.digest not in places)
            self._donors += self._more_donors(lacking)
            # Donors were located from the first one on: those already searched are searched no more.
            for digest, found in self._located(wanted - places.keys()).items():
                places.setdefault(digest, found)
        for path, entry in rest:
            if stopped():
                return
            with self._explain(path):
                self._from_far(path, entry, self._content(path, entry, known), places)

    def _known_content(self) -> dict[tuple[bytes, object], tuple[bytes, int]]:
        """What originals become on this host, as far as that was found out before."""
        known: dict[tuple[bytes, object], tuple[bytes, int]] = {}
        for held in (self.target, self.have, *(donor.held for donor in self._donors)):
            for path, content in held.rewritten.items():
                entry = held.manifest.file(path)
                if entry is not None:
                    known[entry.digest, entry.rewrite] = content
        return known

    def _content(
        self, path: bytes, entry: FileEntry, known: dict[tuple[bytes, object], tuple[bytes, int]]
    ) -> tuple[bytes, int] | None:
        if entry.rewrite is None:
            return entry.digest, entry.size
        return known.get((entry.digest, entry.rewrite))

    def _from_near(self, path: bytes, entry: FileEntry, content: tuple[bytes, int], objects: set[bytes] | None) -> bool:
        """Make a file from what has just left the slot, from the same path of another tree, or from an object."""
        digest = content[0]
        if digest in self._freed and self._take_back(path, entry, content):
            return True
        for donor in self._donors:
            other = donor.held.manifest.file(path)
            same = other is not None and donor.held.content(path, other) == content
            if same and self._from_donor(path, entry, content, donor, path):
                return True
        if objects is None or digest in objects:
            fd = self._objects.open(digest)
            if fd is not None:
                try:
                    if self._copied(path, entry, content, fd):
                        return True
                finally:
                    os.close(fd)
                self._tampered(f"{self._objects.path}/{digest.hex()}", "the content of this object was changed")
                self._objects.remove(digest)
        return False

    def _take_back(self, path: bytes, entry: FileEntry, content: tuple[bytes, int]) -> bool:
        """Move a file that has just left this slot to its new place."""
        fd = self._objects.open(content[0])
        if fd is None:
            return False
        try:
            about = os.fstat(fd)
            if about.st_nlink > 1 or digest_of_file(fd) != content[0]:
                return False
            self._freed.discard(content[0])
            self._create(path, lambda folder, name: self._objects.give_back(content[0], folder, name))
            os.fchmod(fd, self.target.mode(entry))
            os.utime(fd, ns=(entry.mtime, entry.mtime))
        finally:
            os.close(fd)
        self._reused(path, entry, content)
        return True

    def _from_donor(
        self, path: bytes, entry: FileEntry, content: tuple[bytes, int], donor: Donor, source: bytes
    ) -> bool:
        try:
            fd = donor.tree.open_file(source)
        except OSError:
            return False
        try:
            about = os.fstat(fd)
            if (
                self.target.read_only
                and donor.held.read_only
                and not about.st_mode & 0o222
                and about.st_mtime_ns == entry.mtime
                and about.st_mode & 0o777 == self.target.mode(entry)
                and digest_of_file(fd) == content[0]
                and self._linked(path, donor.tree, source)
            ):
                self._reused(path, entry, content)
                return True
            if self._copied(path, entry, content, fd):
                return True
        finally:
            os.close(fd)
        if donor.steady:
            self._tampered(f"{donor.tree.path}/{printable(source)}", "its content was changed")
        return False

    def _linked(self, path: bytes, tree: Tree, source: bytes) -> bool:
        """Make a file a hard link; returns whether that was possible."""
        folder, name = tree.place(source)

        def link(target: int, new: bytes) -> None:
            os.link(name, new, src_dir_fd=folder, dst_dir_fd=target, follow_symlinks=False)

        try:
            self._create(path, link)
        except OSError:
            return False
        return True

    def _copied(self, path: bytes, entry: FileEntry, content: tuple[bytes, int], source: int) -> bool:
        """Make a file from another one; false: that has other content than it should."""
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
        self.reused += content[1]
        if entry.rewrite is not None:
            self.target.rewritten[path] = content
        self._done(path)

    def _tampered(self, path: str, what: str) -> None:
        self.problems.append(Problem(path, what))

    def _located(self, wanted: set[bytes]) -> dict[bytes, tuple[Donor, bytes, int, int]]:
        """Where content is in other trees: (donor, path, offset, size) by digest of a file or of a piece."""
        places: dict[bytes, tuple[Donor, bytes, int, int]] = {}
        seen: set[bytes] = set()
        for donor in self._donors:
            for path, folder in donor.held.manifest.folders.items():
                if folder.digest in seen:
                    continue
                seen.add(folder.digest)
                for name, entry in folder.files.items():
                    if entry.rewrite is not None:
                        content = donor.held.rewritten.get(join(path, name))
                        if content is not None and content[0] in wanted:
                            places.setdefault(content[0], (donor, join(path, name), 0, content[1]))
                        continue
                    if entry.digest in wanted:
                        places.setdefault(entry.digest, (donor, join(path, name), 0, entry.size))
                    if entry.chunks:
                        for digest, offset, size in entry.pieces():
                            if digest in wanted:
                                places.setdefault(digest, (donor, join(path, name), offset, size))
        return places

    def _from_far(
        self,
        path: bytes,
        entry: FileEntry,
        content: tuple[bytes, int] | None,
        places: dict[bytes, tuple[Donor, bytes, int, int]],
    ) -> None:
        """Make a file from wherever its content or pieces of it are, and note the pieces that are missing."""
        if content is not None and (place := places.get(content[0])) is not None:
            donor, source, _, size = place
            if size == content[1] and self._from_donor(path, entry, content, donor, source):
                return
        if not entry.chunks:
            data = self._piece(entry.digest, entry.size, places) if entry.rewrite is not None else None
            if data is None:
                self._wants.setdefault(entry.digest, []).append(_Want(path, entry, 0))
            else:
                self._write(path, entry, data)
                self.reused += len(data)
            return
        fd = self._new_file(path, entry)
        self._partly[path] = entry
        try:
            os.ftruncate(fd, entry.size)
            for digest, offset, size in entry.pieces():
                data = self._piece(digest, size, places)
                if data is None:
                    self._wants.setdefault(digest, []).append(_Want(path, entry, offset))
                else:
                    write_all(fd, data, offset)
                    self.reused += size
        finally:
            os.close(fd)

    def _piece(self, digest: bytes, size: int, places: dict[bytes, tuple[Donor, bytes, int, int]]) -> bytes | None:
        """A piece of a large file, from another tree or the objects; None: this host does not have it."""
        place = places.get(digest)
        if place is not None:
            donor, source, offset, size = place
            try:
                fd = donor.tree.open_file(source)
            except OSError:
                fd = -1
            if fd >= 0:
                try:
                    data = os.pread(fd, size, offset)
                finally:
                    os.close(fd)
                if digest_of(data) == digest:
                    return data
            if donor.steady:
                self._tampered(f"{donor.tree.path}/{printable(source)}", "its content was changed")
        fd = self._objects.open(digest)
        if fd is None:
            return None
        try:
            data = os.pread(fd, size + 1, 0)
        finally:
            os.close(fd)
        if digest_of(data) == digest:
            return data
        self._tampered(f"{self._objects.path}/{digest.hex()}", "the content of this object was changed")
        self._objects.remove(digest)
        return None

    # -- what arrives ----------------------------------------------------------------------------------

    def put(self, digest: bytes, data: memoryview) -> bool:
        """Write a piece wherever it is missing; returns whether it was. It has been verified.

        Raises:
            StoreError: it cannot be written.
        """
        with self._lock:
            wants = self._wants.pop(digest, None)
        if wants is None:
            return False
        done = 0
        try:
            for want in wants:
                with self._explain(want.path):
                    if not want.entry.chunks:
                        self._write(want.path, want.entry, data)
                    else:
                        folder, name = self.tree.place(want.path)
                        fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
                        try:
                            write_all(fd, data, want.offset)
                        finally:
                            os.close(fd)
                done += 1
        except BaseException:
            with self._lock:
                self._wants[digest] = wants[done:]
            raise
        return True

    def _write(self, path: bytes, entry: FileEntry, data: memoryview | bytes, *, last: bool = False) -> None:
        """Make a file of one piece."""
        if entry.rewrite is not None:
            if entry.rewrite.files and not last:
                with self._lock:
                    self._indexes[path] = entry, bytes(data)
                return
            data = self._rewritten(path, entry, bytes(data))
        fd = self._new_file(path, entry)
        try:
            try:
                write_all(fd, data, 0)
                os.utime(fd, ns=(entry.mtime, entry.mtime))
            finally:
                os.close(fd)
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
        """The content of a file that has been made."""
        with os.fdopen(self.tree.open_file(path), "rb") as file:
            return file.read()

    # -- the end ------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Complete the tree: large files, modes and times.

        Raises:
            StoreError: pieces are missing, or something cannot be written.
        """
        if self._wants:
            raise StoreError(
                f"{self.tree.path}: {len(self._wants)} pieces have not arrived, among them one of "
                f"{printable(next(iter(self._wants.values()))[0].path)}: sync again"
            )
        for path in list(self._partly):
            with self._explain(path):
                self._finish_large(path, self._partly.pop(path))
        for path in list(self._indexes):
            with self._explain(path):
                self._write(path, *self._indexes.pop(path), last=True)
        if self._pending:
            raise StoreError(f"{self.tree.path}/{printable(next(iter(self._pending)))} was not made: sync again")
        for path in self._touched:
            if path in self.target.manifest.folders:
                with self._explain(path):
                    self.tree.finish_folder(path, self.target.manifest.folders[path])

    def _finish_large(self, path: bytes, entry: FileEntry) -> None:
        fd = self.tree.open_file(path)
        try:
            if entry.rewrite is not None:
                with os.fdopen(os.dup(fd), "rb") as file:
                    data = file.read()
                self.tree.unlink(path)
                self._write(path, entry, data)
                return
            os.utime(fd, ns=(entry.mtime, entry.mtime))
        finally:
            os.close(fd)
        self._done(path)

    def abandon(self, *, keep_made: bool) -> Held:
        """Leave the change as far as it came; returns what the slot holds now.

        Args:
            keep_made: keep files that were made; otherwise they are removed, so that nothing is left staged.
        """
        if not keep_made:
            for path in self._made:
                self.tree.unlink(path)
                self._pending[path] = self._entry(path)
            self._made.clear()
        for path in self._partly:
            self.tree.unlink(path)
        self._partly.clear()
        folders = dict(self.target.manifest.folders)
        for path in self._pending:
            parent, _, name = path.rpartition(b"/")
            folder = folders[parent]
            if folder is self.target.manifest.folders[parent]:
                folder = folders[parent] = _copied(folder)
            del folder.files[name]
        changed = list(self._ancestors())
        for path in changed:
            if folders[path] is self.target.manifest.folders[path]:
                folders[path] = _copied(folders[path])
        manifest = seal(folders, changed)
        for path in self._touched:
            if path in folders:
                self.tree.finish_folder(path, folders[path])
        rewritten = {p: c for p, c in self.target.rewritten.items() if p not in self._pending}
        return replace(self.target, manifest=manifest, rewritten=rewritten)

    def _entry(self, path: bytes) -> FileEntry:
        entry = self.target.manifest.file(path)
        assert entry is not None, "only files of the target are made"
        return entry

    def _ancestors(self) -> Iterator[bytes]:
        """The folders of files that are not there, and those above."""
        seen: set[bytes] = set()
        for path in self._pending:
            while path:
                path = path.rpartition(b"/")[0]
                if path in seen:
                    break
                seen.add(path)
                yield path


def _copied(folder: Folder) -> Folder:
    return Folder(folder.mode, dict(folder.files), dict(folder.links), dict(folder.folders), folder.digest)


def _process_umask() -> int:
    """The umask of this process, which cannot be read without setting it except here."""
    global _umask
    if _umask < 0:
        with open("/proc/self/status") as file:
            _umask = next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o777)
    return _umask


_umask = -1


def verified(digest: bytes, data: memoryview) -> None:
    """Check a piece that has arrived.

    Raises:
        TamperedError: it is not what its digest says.
    """
    if digest_of(data) != digest:
        raise TamperedError(
            f"a piece of {len(data)} bytes is not {digest.hex()[:12]} as it should be: it is sent again"
        )
