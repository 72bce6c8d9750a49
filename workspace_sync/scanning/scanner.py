"""Scan a workspace into a manifest with as little reading as possible."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import msgspec

from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import MODE_BITS, FileEntry, Folder, Manifest, digest_of, entry_path, printable, seal
from workspace_sync.model.workspace import Links, Workspace, is_environment
from workspace_sync.scanning.hashing import (
    ContentTaker,
    Cuts,
    FileToRead,
    Hashed,
    Outcome,
    ScanPlan,
    hash_files,
    read_at,
)
from workspace_sync.scanning.index import (
    Announcement,
    Index,
    LeftOut,
    LeftOutEntry,
    Record,
    announce,
    left_out,
    sizes_in,
)
from workspace_sync.scanning.rules import GITIGNORE, MESHIGNORE, RuleFile, Rules, Scope, rules_around

# Walk over the folders of a workspace: list the entries, and find the files that must be hashed.
#
# A folder with an unchanged listing is taken from the index as a whole, without a check of each entry. This makes an
# unchanged tree cheap: one ``scandir`` and one comparison of bytes for each folder, and one ``lstat`` for each entry.

_encode = msgspec.msgpack.encode

_ENVIRONMENT = "default: a Python environment"
_KINDS = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
_NONE_IGNORED: dict[bytes, LeftOutEntry] = {}

#: An entry of a listing: (name,) for a folder that is entered; (name, whether it is a folder) if ignored; else
#: (name, size, mtime, ctime, (mode, inode, device)).
Item = tuple[Any, ...]


#: The number of paths that an error lists.
_NAMED = 10


@dataclass(slots=True)
class Problems:
    """Invalid paths of the client by kind of problem; links with their targets."""

    unreadable: list[bytes] = field(default_factory=list[bytes])
    outside: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    loops: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    unsteady: list[bytes] = field(default_factory=list[bytes])
    failed: list[tuple[bytes, str]] = field(default_factory=list[tuple[bytes, str]])

    def check(self) -> None:
        """Raise an error if there are problems.

        Raises:
            ScanError: there are problems; the message names up to 10 of each kind, and the remedy.
        """
        parts: list[str] = []
        if self.unreadable:
            parts.append(
                f"{_counted(self.unreadable, 'cannot be read', 'cannot be read')} by you: "
                f"{_listed([printable(path) for path in self.unreadable])}. "
                "Change their permissions, or leave them out with lines in a .meshignore file."
            )
        if self.outside:
            parts.append(
                f"{_counted(self.outside, 'is a link that leads', 'are links that lead')} out of the workspace: "
                f"{_listed(_arrows(self.outside))}. Leave them out with lines in a .meshignore file, copy what they "
                'lead to with Workspace(links="follow") (--links follow), or keep them with Workspace(links="keep") '
                "(--links keep) if every host has what they lead to."
            )
        if self.loops:
            parts.append(
                f"{_counted(self.loops, 'is a link that leads', 'are links that lead')} back to a folder that holds "
                f"it: {_listed(_arrows(self.loops))}. Leave them out with lines in a .meshignore file."
            )
        if self.unsteady:
            parts.append(
                f"{_counted(self.unsteady, 'changes', 'change')} without pause while being read: "
                f"{_listed([printable(path) for path in self.unsteady])}. Wait until what writes them is done, or "
                "leave them out with lines in a .meshignore file."
            )
        if self.failed:
            parts.append(
                f"{_counted(self.failed, 'cannot be read', 'cannot be read')}: "
                f"{_listed([f'{printable(path)} ({why})' for path, why in self.failed])}."
            )
        if parts:
            raise ScanError(" ".join(parts) + " Nothing was synced.")


def _counted(paths: Sequence[object], one: str, more: str) -> str:
    return f"1 path {one}" if len(paths) == 1 else f"{len(paths)} paths {more}"


def _arrows(links: list[tuple[bytes, bytes]]) -> list[str]:
    return [f"{printable(path)} -> {printable(target)}" for path, target in links]


def _listed(texts: list[str]) -> str:
    rest = len(texts) - _NAMED
    return ", ".join(sorted(texts)[:_NAMED]) + (f", and {rest} more" if rest > 0 else "")


@dataclass(slots=True)
class ToHash:
    """A file that must be read.

    Attributes:
        folder: the path of its folder in the tree.
        item: the index of its item in the listing.
        path: its path at the client.
        size: as listed (bytes).
        known: its previous cuts.
    """

    folder: bytes
    item: int
    path: bytes
    size: int
    known: Cuts | None


@dataclass(slots=True)
class ChangedFolder:
    """A folder that has changed.

    Attributes:
        record: its new record; the entries of files in ``Walk.to_hash`` are still missing.
        items: its listing.
        trusted: whether the next scan may compare with this listing.
    """

    record: Record
    items: list[Item]
    trusted: bool = True


@dataclass(slots=True)
class Walk:
    """Result of a walk.

    Attributes:
        records: the records of all folders, changed or not, by their paths in the tree.
        found: the changed folders.
        to_hash: files whose content must be read.
        reasons: why entries are left out; see ``Index.reasons``.
        problems: folders that cannot be read, and links that lead out of the workspace.
        notes: sentences for the user about ignored entries.
    """

    reasons: list[str]
    problems: Problems = field(default_factory=Problems)
    notes: list[str] = field(default_factory=list[str])
    records: dict[bytes, Record] = field(default_factory=dict[bytes, Record])
    found: dict[bytes, ChangedFolder] = field(default_factory=dict[bytes, ChangedFolder])
    to_hash: list[ToHash] = field(default_factory=list[ToHash])


@dataclass(slots=True)
class _Folder:
    """A folder to visit.

    Attributes:
        path: its path at the client.
        place: its path in the tree.
        around: the rules for its siblings.
        base: the root or followed link from which it was reached.
        chain: the real paths of the root and of the followed folders on the way.
    """

    path: bytes
    place: bytes
    around: Scope
    base: bytes
    chain: tuple[bytes, ...]


class Walker:
    """One walk.

    Args:
        roots: the folders (absolute, links resolved) and their places in the tree.
        index: the results of the last scan, which are only read.
        links: the treatment of links that lead out of the workspace.
        cancelled: returns whether to stop; called once for each folder.
        rules: ignore rules that replace those around each root.
    """

    def __init__(
        self,
        roots: dict[bytes, bytes],
        index: Index,
        links: Links,
        cancelled: Callable[[], bool] | None = None,
        rules: bytes | None = None,
    ) -> None:
        self._roots = roots
        self._old = index.records
        self._links: Links = links
        self._cancelled = cancelled
        self._given = rules
        self._walk = Walk(list(index.reasons))
        self._numbers = {reason: i for i, reason in enumerate(self._walk.reasons)}
        self._todo: list[_Folder] = []

    def run(self) -> Walk:
        """Walk over all folders.

        Raises:
            ScanError: a root is missing, or the scan was cancelled.
        """
        for root, place in self._roots.items():
            if self._given is None:
                around = rules_around(root)
            else:
                around = Rules((), (RuleFile(self._given, root, "environment"),))
            self._todo.append(_Folder(root, place, Scope(around), root, (root,)))
            while self._todo:
                if self._cancelled is not None and self._cancelled():
                    raise ScanError("the scan was cancelled")
                self._visit(self._todo.pop())
        return self._walk

    def _visit(self, folder: _Folder) -> None:
        path, place = folder.path, folder.place
        old = self._old.get(place)
        ignored = _NONE_IGNORED if old is None else old.ignored
        if ignored and (GITIGNORE in ignored or MESHIGNORE in ignored):
            # Ignore files count even if a rule ignores them, and so do their hints.
            ignored = {name: why for name, why in ignored.items() if name not in (GITIGNORE, MESHIGNORE)}
        items: list[Item] = []
        add = items.append
        subfolders: list[bytes] = []
        follow = self._links == "follow"
        try:
            mode = os.stat(path).st_mode & MODE_BITS
            with os.scandir(path) as entries:
                for entry in entries:
                    name = entry.name
                    if ignored and name in ignored:
                        add((name, entry.is_dir(follow_symlinks=False)))
                    elif entry.is_dir(follow_symlinks=False):
                        subfolders.append(name)
                        add((name,))
                    else:
                        try:
                            about = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue  # removed since it was listed
                        if follow and stat.S_ISLNK(about.st_mode) and (target := self._followed(folder, name)):
                            if stat.S_ISDIR(target.st_mode):
                                subfolders.append(name)
                                add((name,))
                                continue
                            about = target
                        add((name, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about[:3]))
        except (FileNotFoundError, NotADirectoryError):
            self._gone(folder)
            return
        except PermissionError:
            self._walk.problems.unreadable.append(path)
            return
        except OSError as e:
            self._walk.problems.failed.append((path, e.strerror or str(e)))
            return
        if old is not None and old.outer == folder.around.digest:
            # The rules of a nested repository may change without a trace in the listing.
            expected = None if b".git" in ignored else old.inner
            within = folder.around
            if expected is None or expected != old.outer:
                within = Scope(folder.around, path, expected)
            if within.digest == old.inner and old.hints == _encode([mode, items]):
                self._walk.records[place] = old
                self._enter(folder, within, old.subfolders)
                return
        self._compare(folder, old, mode, items, set(subfolders))

    def _enter(self, folder: _Folder, within: Scope, names: list[bytes]) -> None:
        for name in names:
            path = folder.path + b"/" + name
            base, chain = folder.base, folder.chain
            if self._links == "follow" and os.path.islink(path):
                base = path
                chain = (*chain, os.path.realpath(path))
            self._todo.append(_Folder(path, entry_path(folder.place, name), within, base, chain))

    def _gone(self, folder: _Folder) -> None:
        """Handle a folder that vanished after its parent was listed."""
        if folder.path in self._roots:
            raise ScanError(f"{printable(folder.path)} is gone: it is a folder of the workspace")
        parent, _, name = folder.place.rpartition(b"/")
        found = self._reopened(parent)
        found.record.subfolders.remove(name)

    def _reopened(self, place: bytes) -> ChangedFolder:
        """Reopen a visited folder for changes; the next scan will not trust it."""
        found = self._walk.found.get(place)
        if found is None:
            record = self._walk.records[place]
            folder = record.folder
            record = Record(
                record.hints,
                record.outer,
                record.inner,
                dict(record.ignored),
                list(record.subfolders),
                Folder(folder.mode, folder.files, folder.links, {}),
                record.anchors,
            )
            found = ChangedFolder(record, list(map(tuple, msgspec.msgpack.decode(record.hints)[1])))
            self._walk.records[place] = record
            self._walk.found[place] = found
        found.trusted = False
        return found

    # -- a changed folder -------------------------------------------------------------------------------

    def _compare(
        self, folder: _Folder, old: Record | None, mode: int, items: list[Item], subfolders: set[bytes]
    ) -> None:
        path, place = folder.path, folder.place
        names = {item[0] for item in items}
        within = folder.around
        if GITIGNORE in names or MESHIGNORE in names or b".git" in names:
            within = Scope(folder.around, path)
        if (b"pyvenv.cfg" in names or b"conda-meta" in names) and self._is_left_out_environment(folder):
            found = self._reopened(place.rpartition(b"/")[0])
            name = os.path.basename(path)
            found.record.subfolders.remove(name)
            found.record.ignored[name] = LeftOutEntry(self._reason(_ENVIRONMENT), folder=True)
            return
        hints: dict[bytes, list[object]] = {}
        judged = False  # whether earlier verdicts still hold
        if old is not None:
            judged = old.outer == folder.around.digest and old.inner == within.digest
            if old.hints:
                _, listed = msgspec.msgpack.decode(old.hints)
                hints = {item[0]: item for item in listed if len(item) == 5}
        record = Record(b"", folder.around.digest, within.digest, {}, [], Folder(mode, {}, {}, {}))
        found = ChangedFolder(record, [])
        before = old if old is not None else record
        for listed in items:
            item = listed
            name = item[0]
            if len(item) == 2:
                assert old is not None  # only a record has ignored entries
                known = old.ignored[name]
                if judged and known.folder == item[1]:
                    record.ignored[name] = known
                    found.items.append(item)
                    continue
                item = _looked_at(path + b"/" + name, name)
                if item is None:
                    continue
            is_folder = len(item) == 1
            kept = judged and (name in old.subfolders if is_folder else name in hints)  # type: ignore[union-attr]
            if judged and old is not None and name in old.ignored:
                kept = False
            if not kept and (why := self._why_left_out(within, name, path + b"/" + name, is_folder)) is not None:
                record.ignored[name] = LeftOutEntry(self._reason(why), 0 if is_folder else item[1], is_folder)
                found.items.append(item if name in (GITIGNORE, MESHIGNORE) else (name, is_folder))
            elif is_folder:
                record.subfolders.append(name)
                found.items.append(item)
            else:
                self._file(folder, found, before, hints.get(name), item)
        self._walk.records[place] = record
        self._walk.found[place] = found
        self._enter(folder, within, record.subfolders)

    def _file(
        self, folder: _Folder, found: ChangedFolder, before: Record, hint: list[object] | None, item: Item
    ) -> None:
        """Handle an entry that is not a folder and not ignored by a rule."""
        name, size, mtime, ctime, (mode, inode, device) = item
        path = folder.path + b"/" + name
        kind = stat.S_IFMT(mode)
        if kind == stat.S_IFREG:
            entry = before.folder.files.get(name)
            anchors = before.anchors.get(name)
            found.items.append(item)
            if entry is not None and hint is not None and hint[1:] == [size, mtime, ctime, [mode, inode, device]]:
                found.record.folder.files[name] = entry
                if anchors is not None:
                    found.record.anchors[name] = anchors
            else:
                known = Cuts(entry.sizes, anchors) if entry is not None and anchors is not None else None
                self._walk.to_hash.append(ToHash(folder.place, len(found.items) - 1, path, size, known))
        elif kind == stat.S_IFLNK:
            try:
                target = os.readlink(path)
            except OSError:
                found.trusted = False
                return
            inner = inner_target(target, folder.path, folder.place, folder.base, self._roots)
            if inner is None and self._links == "keep":
                inner = target
            if inner is None:
                self._walk.problems.outside.append((path, target))
            else:
                found.record.folder.links[name] = inner
            found.items.append(item)
        else:
            named = _KINDS.get(kind, "special file")
            if name in before.folder.files or name in before.folder.links:
                self._walk.notes.append(
                    f"{printable(path)} is a {named} where a file was synced before: hosts have no such file any more"
                )
            found.record.ignored[name] = LeftOutEntry(self._reason(f"cannot be synced: {named}"))
            found.items.append((name, False))

    def _why_left_out(self, within: Scope, name: bytes, path: bytes, is_folder: bool) -> str | None:
        line = within.rules.verdict(name, path, is_folder)
        if line is not None:
            return None if line.brings_back else line.source
        return _ENVIRONMENT if is_folder and is_environment(path) else None

    def _is_left_out_environment(self, folder: _Folder) -> bool:
        if folder.path in self._roots or not is_environment(folder.path):
            return False
        line = folder.around.rules.verdict(os.path.basename(folder.path), folder.path, True)
        return line is None or not line.brings_back

    def _reason(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self._walk.reasons))
        if number == len(self._walk.reasons):
            self._walk.reasons.append(text)
        return number

    def _followed(self, folder: _Folder, name: bytes) -> os.stat_result | None:
        """Return the state of a link's target if it is outside the workspace and to be followed; else None."""
        path = folder.path + b"/" + name
        try:
            target = os.readlink(path)
            if inner_target(target, folder.path, folder.place, folder.base, self._roots) is not None:
                return None
            about = os.stat(path)
        except OSError:
            return None  # its target does not exist; it is reported as a link to outside
        real = os.path.realpath(path)
        if stat.S_ISDIR(about.st_mode) and any(_holds(real, each) for each in folder.chain):
            self._walk.problems.loops.append((path, real))
            return None
        return about


def _looked_at(path: bytes, name: bytes) -> Item | None:
    """Return the item of an entry that was ignored until now; None if it no longer exists."""
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(about.st_mode):
        return (name,)
    return (name, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about[:3])


def _holds(outer: bytes, inner: bytes) -> bool:
    return outer == inner or inner.startswith(outer.rstrip(b"/") + b"/")


def inner_target(target: bytes, folder: bytes, place: bytes, base: bytes, roots: dict[bytes, bytes]) -> bytes | None:
    """Return the target of a link in the tree; None if it leads out of the workspace.

    A relative link that stays below its root is unchanged. Other links into the workspace, such as absolute ones,
    become relative, because the path of the tree differs between hosts.

    Args:
        target: of the link, which need not exist.
        folder: the folder of the link (absolute).
        place: that folder's path in the tree.
        base: the root of the workspace, or the followed link, from which the folder was reached.
        roots: the folders of the workspace (links resolved) and their places.
    """
    if not target.startswith(b"/"):
        parts = [part for part in target.split(b"/") if part not in (b"", b".")]
        up = 0
        while up < len(parts) and parts[up] == b"..":
            up += 1
        if b".." not in parts[up:] and up <= folder[len(base) :].count(b"/"):
            return target
    real = os.path.realpath(os.path.join(folder, target))
    for root, root_place in roots.items():
        if real == root or real.startswith(root.rstrip(b"/") + b"/"):
            there = b"/".join(part for part in (root_place, real[len(root) :].strip(b"/")) if part)
            return os.path.relpath(b"/" + there, b"/" + place)
    return None


#: A file that changed this shortly before the scan may change again without new times (ns): file systems keep times
#: in steps of up to 2 s.
RECENT = 2_000_000_000
#: The mode of parent folders of a place in the tree that correspond to no folder of the client.
_PLAIN = 0o755


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
