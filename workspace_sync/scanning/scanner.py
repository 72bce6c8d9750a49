"""The content of a workspace now, as a manifest, with as little reading as possible."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Lock

import msgspec

from workspace_sync.model.manifest import MODE_BITS, FileEntry, Folder, Manifest, seal
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning.announcement import announce
from workspace_sync.scanning.hashing import FileToRead, Hashed, Outcome, hash_files
from workspace_sync.scanning.index import Index
from workspace_sync.scanning.problems import Problems
from workspace_sync.scanning.result import Scan
from workspace_sync.scanning.streaming import ContentTaker, ScanPlan
from workspace_sync.scanning.walk import Item, Walk, Walker, join

#: A file that changed so shortly before the scan may change again without new times (ns): file systems keep times in
#: steps of up to 2 s.
RECENT = 2_000_000_000
#: Folders on the way to a place in the tree that no folder of the client stands for.
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
    """Find out what a workspace holds now.

    Args:
        workspace: its folders.
        index: what is known from earlier scans; it is brought up to date.
        rules: ignore rules that hold for each folder instead of those of git and around it, as in a ``.meshignore``;
            ``!*`` takes everything.
        progress: is called with the bytes that were read, and all that must be, on any thread.
        cancelled: whether to stop; asked often.
        save: whether to save the index, which takes a while if it is large and has changed.
        taker: is offered the content of files while they are read.

    Raises:
        ScanError: a folder is gone, paths cannot be read or change without pause, links lead out of the workspace, or
            it was cancelled. The message names them, and nothing is remembered.
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
    """What a scan that has walked over all folders is about to read."""
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
    """Hash the files that must be, and enter them; returns the bytes that were read."""
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
        FileToRead(each.path, each.size, each.known, join(each.folder, walk.found[each.folder].items[each.item][0]))
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
            found.trusted = False  # it is gone, although it was listed
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
    """The manifest. Folders of earlier manifests are shared and not changed."""
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
        prefix = place + b"/" if place else b""
        folder = found.record.folder
        for name in found.record.subfolders:
            folder.folders[name] = folders[prefix + name].digest
    return seal(folders, changed)


def _distrusted(item: Item, started: int) -> Item:
    """The item of a listing as it is kept; one that is as recent as the scan equals none that is found later."""
    if len(item) != 5:
        return item
    name, size, mtime, ctime, rest = item
    if ctime > started - RECENT or started - RECENT < mtime <= time.time_ns():
        return (name, size, -1, ctime, rest)
    return item
