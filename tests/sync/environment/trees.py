"""An environment moved in memory, and compared with one that was installed at the target."""

from __future__ import annotations

import os
from pathlib import Path

from workspace_sync.environment.manifests import EnvironmentScan
from workspace_sync.environment.rewriter import Rewriter
from workspace_sync.model.manifest import FileEntry
from workspace_sync.scanning import Scan
from workspace_sync.store.store import Store


def content(scanned: EnvironmentScan, entry: FileEntry) -> bytes:
    """The content of a file at the client, by its pieces."""
    data = bytearray(entry.size)
    for digest, offset, size in entry.pieces():
        scanned.read(digest, memoryview(data)[offset : offset + size])
    return bytes(data)


def moved(scanned: EnvironmentScan, target: Path) -> dict[str, bytes | str | int]:
    """The files (bytes), links (str) and folders (mode) that a host makes of an environment for a prefix."""
    rewriter = Rewriter(str(target))
    made: dict[bytes, bytes] = {}

    def make(path: bytes) -> bytes:
        if path not in made:
            entry = scanned.manifest.file(path)
            assert entry is not None
            made[path] = rewriter(entry, content(scanned, entry), path=path, read=make)
        return made[path]

    tree: dict[str, bytes | str | int] = {}
    for path, folder in scanned.manifest.folders.items():
        tree[os.fsdecode(path)] = folder.mode
        for name in folder.files:
            whole = path + b"/" + name if path else name
            tree[os.fsdecode(whole)] = make(whole)
        for name, to in folder.links.items():
            tree[os.fsdecode(path + b"/" + name if path else name)] = os.fsdecode(to)
    return tree


def stored(scanned: EnvironmentScan, root: Path, target: str | None = None, tree: Scan | None = None) -> Path:
    """The folder that a host's store makes of an environment.

    Args:
        root: of the store.
        target: the prefix that its files are to name. None: its own.
        tree: the folders that belong to it.
    """
    folder = Store(str(root)).workspace("name-0123456789abcdef")
    made = Path(folder.path) / "current" / "env"
    manifests = {"env": scanned.manifest} if tree is None else {"env": scanned.manifest, "tree": tree.manifest}
    with folder.lock("test", 1.0):
        staging = folder.stage(manifests, Rewriter(target or str(made)))
        for digest, size in staging.missing:
            data = memoryview(bytearray(size))
            try:
                scanned.read(digest, data)
            except KeyError:
                assert tree is not None
                tree.read(digest, data)
            staging.put(digest, data)
        staging.finish()
        staging.commit()
    return made


def installed(prefix: Path) -> dict[str, bytes | str | int]:
    """The same of a folder as it is."""
    tree: dict[str, bytes | str | int] = {"": os.stat(prefix).st_mode & 0o777}
    for folder, folders, files in os.walk(prefix):
        for name in folders + files:
            path = os.path.join(folder, name)
            key = os.path.relpath(path, prefix)
            if os.path.islink(path):
                tree[key] = os.readlink(path)
            elif os.path.isdir(path):
                tree[key] = os.stat(path).st_mode & 0o777
            else:
                tree[key] = Path(path).read_bytes()
    return tree


def assert_equal_trees(tree: dict[str, bytes | str | int], prefix: Path, *, without: tuple[str, ...] = ()) -> None:
    """Compare byte by byte; of compiled modules, all but the time at which their source was installed.

    Args:
        without: paths that are known to differ.
    """
    expected = installed(prefix)
    assert sorted(tree.keys() - {*without}) == sorted(expected.keys() - {*without})
    different = [
        path
        for path, want in expected.items()
        if path not in without and _timeless(path, tree[path]) != _timeless(path, want)
    ]
    assert not different, different


def _timeless(path: str, what: bytes | str | int) -> bytes | str | int:
    if isinstance(what, bytes) and path.endswith(".pyc") and what[4:8] == bytes(4):
        return what[:8] + what[12:]
    return what
