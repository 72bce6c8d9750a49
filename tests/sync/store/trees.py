"""Trees in memory, their manifests, and what is on disk: what the tests of the store are written with."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from workspace_sync.model.manifest import FileEntry, Folder, Manifest, Rewrite, digest_of, seal
from workspace_sync.store.records import Generation
from workspace_sync.store.staging import Staging
from workspace_sync.store.workspace_folder import WorkspaceFolder

MTIME = 1_700_000_000_123_456_789


class Link(bytes):
    """A symbolic link, by its target."""


class File(bytes):
    """A file with a mode, and how it is rewritten."""

    mode = 0o644
    mtime = MTIME
    rewrite: Rewrite | None = None


def file(content: bytes, mode: int = 0o644, mtime: int = MTIME, rewrite: Rewrite | None = None) -> File:
    made = File(content)
    made.mode, made.mtime, made.rewrite = mode, mtime, rewrite
    return made


class Content:
    """A tree in memory: content by path; a path that ends with a slash is a folder.

    Args:
        entries: ``bytes`` for a file, ``Link`` for a link, an int for the mode of a folder.
        chunk: the size of pieces; files of at most that size are one piece.
    """

    def __init__(self, entries: Mapping[bytes, bytes | int], chunk: int = 1 << 20) -> None:
        self.pieces: dict[bytes, bytes] = {}
        folders: dict[bytes, Folder] = {b"": Folder(0o755, {}, {}, {})}

        def folder(path: bytes) -> Folder:
            if path not in folders:
                parent, _, name = path.rpartition(b"/")
                folder(parent).folders[name] = b""
                folders[path] = Folder(0o755, {}, {}, {})
            return folders[path]

        for path, value in entries.items():
            if isinstance(value, int):
                folder(path.rstrip(b"/")).mode = value
                continue
            parent, _, name = path.rpartition(b"/")
            if isinstance(value, Link):
                folder(parent).links[name] = bytes(value)
                continue
            made = value if isinstance(value, File) else file(value)
            parts = [bytes(made[at : at + chunk]) for at in range(0, len(made), chunk)]
            for part in parts:
                self.pieces[digest_of(part)] = part
            large = len(parts) > 1
            folder(parent).files[name] = FileEntry(
                len(made),
                made.mode,
                digest_of(bytes(made)),
                made.mtime,
                tuple(map(digest_of, parts)) if large else (),
                tuple(map(len, parts)) if large else (),
                made.rewrite,
            )
        self.manifest: Manifest = seal(folders)


def sync(
    folder: WorkspaceFolder, content: Content, part: str = "tree", **options: object
) -> tuple[Staging, Generation]:
    """Stage some content, give what is missing, and switch."""
    with folder.lock("the test", 5):
        staging = folder.stage({part: content.manifest}, **options)  # type: ignore[arg-type]
        for digest, size in staging.missing:
            assert size == len(content.pieces[digest])
            staging.put(digest, memoryview(content.pieces[digest]))
        staging.finish()
        return staging, staging.commit()


def on_disk(root: str | Path) -> dict[bytes, bytes | int | tuple[bytes, int]]:
    """What is below a folder: (content, mode) of files, targets of links, modes of folders."""
    found: dict[bytes, bytes | int | tuple[bytes, int]] = {}
    top = os.fsencode(root)

    def visit(fd: int, path: bytes) -> None:
        for text in os.listdir(fd):
            name = os.fsencode(text)
            whole = path + b"/" + name if path else name
            about = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISLNK(about.st_mode):
                found[whole] = os.readlink(name, dir_fd=fd)
            elif stat.S_ISDIR(about.st_mode):
                found[whole] = stat.S_IMODE(about.st_mode)
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                try:
                    visit(below, whole)
                finally:
                    os.close(below)
            else:
                with os.fdopen(os.open(name, os.O_RDONLY, dir_fd=fd), "rb") as opened:
                    found[whole] = opened.read(), stat.S_IMODE(about.st_mode)

    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        visit(fd, b"")
    finally:
        os.close(fd)
    return found


def expected(content: Content) -> dict[bytes, bytes | int | tuple[bytes, int]]:
    """What should be on disk of some content."""
    found: dict[bytes, bytes | int | tuple[bytes, int]] = {}
    for path, folder in content.manifest.folders.items():
        if path:
            found[path] = folder.mode
        prefix = path + b"/" if path else b""
        for name, entry in folder.files.items():
            data = b"".join(content.pieces[digest] for digest, _, _ in entry.pieces())
            found[prefix + name] = data, entry.mode
        for name, target in folder.links.items():
            found[prefix + name] = target
    return found


def missing(folder: WorkspaceFolder, content: Content) -> list[tuple[bytes, int]]:
    """What a host would ask for."""
    with folder.lock("the test", 5):
        staging = folder.stage({"tree": content.manifest})
        found = staging.missing
        staging.abort()
    return found


def roll_back(folder: WorkspaceFolder, steps: int = 1) -> Generation:
    """Go back to an earlier tree, without anything from elsewhere."""
    with folder.lock("the test", 5):
        staging = folder.rollback(steps)
        staging.finish()
        return staging.commit()
