"""Walk over the folders of a workspace: list the entries, and find the files that must be hashed.

A folder with an unchanged listing is taken from the index as a whole, without a check of each entry. This makes an
unchanged tree cheap: one ``scandir`` and one comparison of bytes for each folder, and one ``lstat`` for each entry.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import MODE_BITS, Folder, entry_path, printable
from workspace_sync.model.workspace import Links, is_environment
from workspace_sync.scanning.hashing import Cuts
from workspace_sync.scanning.index import Index, LeftOutEntry, Record
from workspace_sync.scanning.rules import GITIGNORE, MESHIGNORE, RuleFile, Rules, Scope, rules_around

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
        hints: dict[bytes, list[Any]] = {}
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

    def _file(self, folder: _Folder, found: ChangedFolder, before: Record, hint: list[Any] | None, item: Item) -> None:
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
