"""Scan a workspace into a manifest with as little reading as possible."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock

import msgspec

from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import MODE_BITS, FileEntry, Folder, Manifest, digest_of, entry_path, printable, seal
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning.hashing import ContentTaker, FileToRead, Hashed, Outcome, ScanPlan, hash_files, read_at
from workspace_sync.scanning.index import Announcement, Index, LeftOut, Record, announce, left_out, sizes_in
from workspace_sync.scanning.walk import Item, Problems, Walk, Walker

#: A file that changed this shortly before the scan may change again without new times (ns): file systems keep times
#: in steps of up to 2 s.
RECENT = 2_000_000_000
#: The mode of parent folders of a place in the tree that correspond to no folder of the client.
_PLAIN = 0o755

_encode = msgspec.msgpack.encode


def scan(
    workspace: Workspace,
    index: Index,
    *,
    rules: bytes | None = None,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    save: bool = True,
    taker: ContentTaker | None = None,
) -> Scan:
    """Scan a workspace, and return its current content.

    Args:
        workspace: its folders.
        index: the results of earlier scans, which are updated.
        rules: ignore rules for each folder, in the syntax of ``.meshignore``, instead of those of git and of the
            folders around it; ``!*`` includes everything.
        progress: called with the number of bytes read, and their total, on any thread.
        cancelled: returns whether to stop; polled often.
        save: whether to save the index, which takes a while if it is large and has changed.
        taker: receives the content of files while they are read.

    Raises:
        ScanError: a folder is missing, paths cannot be read or keep changing, links lead out of the workspace, or the
            scan was cancelled. The message names the paths, and the index is unchanged.
    """
    started = time.time_ns()
    named = workspace.roots()
    roots = {os.fsencode(folder): os.fsencode(place) for folder, place in named.items()}
    index.load(named, workspace.links)
    walk = Walker(roots, index, workspace.links, cancelled, rules).run()
    if taker is not None:
        walk.problems.check()  # before anything is sent
        taker.planned(_plan(walk, roots, list(named)))
    hashed = _read(walk, progress, cancelled, taker)
    changed = bool(walk.found) or len(walk.records) != len(index.records)
    manifest = index.manifest
    if changed or manifest is None:
        manifest = _assembled(walk, roots)
    for found in walk.found.values():
        mode = found.record.folder.mode if found.trusted else -1
        found.record.hints = _encode([mode, [_distrusted(item, started) for item in found.items]])
    index.replace(walk.records, walk.reasons, manifest, changed=changed)
    if save:
        index.save()
    return Scan(workspace, manifest, roots, walk.records, walk.reasons, hashed, walk.notes)


def _plan(walk: Walk, roots: dict[bytes, bytes], sources: list[str]) -> ScanPlan:
    """Plan the reads of a scan that has walked over all folders."""
    sizes: dict[bytes, list[int]] = {}
    for each in walk.to_hash:
        sizes.setdefault(each.folder, []).append(each.size)
    about = announce(sizes, walk.records, walk.reasons, sources)
    total = sum(map(sum, sizes.values()))
    return ScanPlan({place: folder for folder, place in roots.items()}, len(walk.to_hash), total, about)


def _read(
    walk: Walk,
    progress: Callable[[int, int], None] | None,
    cancelled: Callable[[], bool] | None,
    taker: ContentTaker | None,
) -> int:
    """Hash the files that must be read, and enter them; return the number of bytes read."""
    if walk.problems.outside or walk.problems.loops:
        walk.problems.check()  # before much is read
    total = sum(each.size for each in walk.to_hash)
    done = 0
    lock = Lock()

    def report(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            if progress is not None:
                progress(done, max(total, done))

    files = [
        FileToRead(
            each.path, each.size, each.known, entry_path(each.folder, walk.found[each.folder].items[each.item][0])
        )
        for each in walk.to_hash
    ]
    outcomes = hash_files(files, report, cancelled, taker)
    problems = walk.problems
    for i, each in enumerate(walk.to_hash):
        outcome, outcomes[i] = outcomes[i], None
        found = walk.found[each.folder]
        name = found.items[each.item][0]
        if isinstance(outcome, Hashed):
            sizes: tuple[int, ...] = ()
            if outcome.cuts is not None:
                sizes = outcome.cuts.sizes
                found.record.anchors[name] = outcome.cuts.anchors
            mode = outcome.node[0] & MODE_BITS
            found.record.folder.files[name] = FileEntry(
                outcome.size, mode, outcome.digest, outcome.mtime, outcome.chunks, sizes
            )
            found.items[each.item] = (name, outcome.size, outcome.mtime, outcome.ctime, outcome.node)
        else:
            _enter_problem(problems, each.path, outcome)
            found.trusted = False  # it no longer exists, although it was listed
    problems.check()
    return done


def _enter_problem(problems: Problems, path: bytes, outcome: Outcome) -> None:
    if isinstance(outcome, PermissionError):
        problems.unreadable.append(path)
    elif isinstance(outcome, OSError):
        problems.failed.append((path, outcome.strerror or str(outcome)))
    elif outcome == "unsteady":
        problems.unsteady.append(path)


def _assembled(walk: Walk, roots: dict[bytes, bytes]) -> Manifest:
    """Assemble the manifest. Folders of earlier manifests are shared and not changed."""
    folders = {place: record.folder for place, record in walk.records.items()}
    changed = set(walk.found)
    for root_place in roots.values():
        place = root_place
        parent, _, name = place.rpartition(b"/")
        while name:
            folders.setdefault(parent, Folder(_PLAIN, {}, {}, {})).folders[name] = folders[place].digest
            changed.add(parent)
            place = parent
            parent, _, name = parent.rpartition(b"/")
    if b"" not in folders:
        folders[b""] = Folder(_PLAIN, {}, {}, {})
        changed.add(b"")
    for place in list(walk.found):
        while place:
            place = place.rpartition(b"/")[0]
            if place in changed:
                continue
            record = walk.records[place]
            old = record.folder
            folders[place] = Folder(old.mode, old.files, old.links, dict(old.folders))
            walk.records[place] = msgspec.structs.replace(record, folder=folders[place])
            changed.add(place)
    for place, found in walk.found.items():
        for name in found.record.subfolders:
            found.record.folder.folders[name] = folders[entry_path(place, name)].digest
    return seal(folders, changed)


def _distrusted(item: Item, started: int) -> Item:
    """Return the item of a listing as stored. An item that is as recent as the scan never equals a later one."""
    if len(item) != 5:
        return item
    name, size, mtime, ctime, rest = item
    if ctime > started - RECENT or started - RECENT < mtime <= time.time_ns():
        return (name, size, -1, ctime, rest)
    return item


# -- the result -----------------------------------------------------------------------------------

#: Location of a piece: the folder in the tree, the name of the file, the offset and the size (bytes).
_Place = tuple[bytes, bytes, int, int]


def path_at_client(roots: Mapping[bytes, bytes], path: bytes) -> bytes:
    """Return the client's path of a path in the tree.

    Args:
        roots: the folders of the client by their places in the tree.
        path: in the tree.
    """
    top = path
    while top not in roots:
        top = top.rpartition(b"/")[0]
    return roots[top] + (b"/" + path[len(top) :].strip(b"/") if len(path) > len(top) else b"")


def read_first(readers: Sequence[Callable[[bytes, memoryview], None]], digest: bytes, into: memoryview) -> None:
    """Read a piece of content with the first reader that has it (``Scan.read``).

    Raises:
        KeyError: no reader has it.
    """
    for read in readers[:-1]:
        try:
            return read(digest, into)
        except KeyError:
            continue
    return readers[-1](digest, into)


class Scan:
    """Content of a workspace at the time of a scan. Thread-safe.

    Attributes:
        workspace: its folders.
        manifest: its content.
        hashed: the number of bytes that had to be read.
        notes: sentences for the user about ignored entries.
    """

    def __init__(
        self,
        workspace: Workspace,
        manifest: Manifest,
        roots: dict[bytes, bytes],
        records: dict[bytes, Record],
        reasons: list[str],
        hashed: int,
        notes: list[str],
    ) -> None:
        self.workspace = workspace
        self.manifest = manifest
        self.hashed = hashed
        self.notes = notes
        self._roots = {place: folder for folder, place in roots.items()}
        self._records = records
        self._reasons = reasons
        self._lock = threading.Lock()
        self._places: tuple[dict[bytes, _Place], dict[bytes, list[_Place]]] | None = None

    @property
    def ignored(self) -> list[LeftOut]:
        """The ignored entries, grouped by the line that ignores them."""
        return left_out(self._records, self._reasons)

    def announcement(self) -> Announcement | None:
        """Describe a first sync; return None if it sends at most 10,000 files and 1 GB."""
        return announce(dict(sizes_in(self.manifest)), self._records, self._reasons, list(self.workspace.roots()))

    def read(self, digest: bytes, into: memoryview) -> None:
        """Read one piece: a file, or a chunk of one.

        Args:
            digest: of the piece.
            into: receives the content; it has the size of the piece.

        Raises:
            KeyError: the workspace has no such piece.
            ScanError: the file has changed since the scan.
        """
        first, others = self._pieces()
        place = first[digest]
        for folder, name, offset, size in (place, *others.get(digest, ())):
            if size == len(into) and read_at(self.path_of(folder, name), offset, into) and digest_of(into) == digest:
                return
        folder, name, _, _ = place
        raise ScanError(
            f"{printable(self.path_of(folder, name))} changed while it was read for the sync. Hosts keep the tree that "
            "they have; sync again when what writes it is done, or leave it out with a line in a .meshignore file."
        )

    def read_many(self, wanted: Iterable[tuple[bytes, memoryview]]) -> None:
        """Read several pieces, as ``read`` does.

        Raises:
            KeyError: the workspace has no such piece.
            ScanError: a file has changed since the scan.
        """
        for digest, into in wanted:
            self.read(digest, into)

    def path_of(self, place: bytes, name: bytes = b"") -> bytes:
        """Return the client's path of a folder of the tree, or of a file in it."""
        return entry_path(path_at_client(self._roots, place), name) if name else path_at_client(self._roots, place)

    def _pieces(self) -> tuple[dict[bytes, _Place], dict[bytes, list[_Place]]]:
        """Locate each piece and its copies."""
        with self._lock:
            if self._places is None:
                first: dict[bytes, _Place] = {}
                others: dict[bytes, list[_Place]] = {}
                for place, folder in self.manifest.folders.items():
                    for name, entry in folder.files.items():
                        for digest, offset, size in entry.pieces():
                            here = (place, name, offset, size)
                            if first.setdefault(digest, here) is not here:
                                others.setdefault(digest, []).append(here)
                self._places = first, others
            return self._places
