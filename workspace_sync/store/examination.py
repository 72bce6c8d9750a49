"""Examine a tree: hash each file, and compare it with the manifests that the tree may match."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from workspace_sync.model.manifest import MODE_BITS, FileEntry, Folder, Manifest, entry_path, printable, seal
from workspace_sync.store.objects import digest_of_file
from workspace_sync.store.tree import Descriptor, TreeFolder

#: The number of files of a folder that one thread hashes.
_FEW = 8


@dataclass
class HeldManifest:
    """A manifest as a host holds it.

    Attributes:
        manifest: the manifest sent by the client.
        rewritten: the (digest, size) of rewritten files on this host, by path.
        read_only: whether files have no write permission, so that several trees can share them.
    """

    manifest: Manifest
    rewritten: dict[bytes, tuple[bytes, int]] = field(default_factory=dict[bytes, tuple[bytes, int]])
    read_only: bool = False

    def mode(self, entry: FileEntry) -> int:
        """Return the mode of a file on this host."""
        return entry.mode & ~0o222 if self.read_only else entry.mode

    def content(self, path: bytes, entry: FileEntry) -> tuple[bytes, int] | None:
        """Return the (digest, size) of a file on this host; None: unknown, for a rewritten file."""
        if entry.rewrite is None:
            return entry.digest, entry.size
        return self.rewritten.get(path)


@dataclass(frozen=True)
class Problem:
    """Damage that was found.

    Attributes:
        path: the full path.
        what: a description of the damage.
    """

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


def empty(mode: int = 0o700) -> Manifest:
    """Return the manifest of an empty tree."""
    return seal({b"": Folder(mode, {}, {}, {})})


def compared(tree: TreeFolder, held: HeldManifest) -> Iterator[Problem]:
    """Compare a tree with its manifest: content, links and modes. Paths outside the manifest are ignored."""
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        for path, folder in held.manifest.folders.items():
            yield from _folder_problems(tree, held, path, folder, pool)


def _folder_problems(
    tree: TreeFolder, held: HeldManifest, path: bytes, folder: Folder, pool: ThreadPoolExecutor
) -> Iterator[Problem]:
    def problem(name: bytes, what: str) -> Problem:
        return Problem(f"{tree.path}/{printable(entry_path(path, name))}", what)

    try:
        fd = tree.folder(path)
    except OSError as e:
        yield problem(b"", f"the folder is missing or replaced ({e.strerror})")
        return
    if stat.S_IMODE(os.fstat(fd).st_mode) != folder.mode:
        yield problem(b"", f"the folder's mode is {stat.S_IMODE(os.fstat(fd).st_mode):o}, not {folder.mode:o}")
    for name, target in folder.links.items():
        try:
            found = os.fsencode(os.readlink(name, dir_fd=fd))
        except OSError:
            found = None
        if found != target:
            yield problem(name, "the link is missing or changed")
    names = list(folder.files)

    def check(name: bytes) -> str:
        entry = folder.files[name]
        return _file_problem(fd, name, held.mode(entry), held.content(entry_path(path, name), entry))

    for name, what in zip(names, pool.map(check, names) if len(names) > _FEW else map(check, names)):
        if what:
            yield problem(name, what)


def _file_problem(folder: int, name: bytes, mode: int, content: tuple[bytes, int] | None) -> str:
    """Describe the damage of a file; "" if there is none."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as e:
        return f"the file cannot be opened ({e.strerror})"
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            return "it is no regular file any more"
        if about.st_mode & MODE_BITS != mode:
            return f"its mode is {about.st_mode & MODE_BITS:o}, not {mode:o}"
        if content is None:
            return "it is not known what it should be on this host"
        if about.st_size != content[1] or digest_of_file(fd) != content[0]:
            return "its content was changed"
    except OSError as e:
        return f"the file cannot be read ({e.strerror})"
    finally:
        os.close(fd)
    return ""


def without(held: HeldManifest, paths: Collection[bytes]) -> HeldManifest:
    """Return a manifest without some of its files; changed folders are copied."""
    folders = dict(held.manifest.folders)
    changed: set[bytes] = set()
    for path in paths:
        while path:
            path = path.rpartition(b"/")[0]
            if path in changed:
                break
            changed.add(path)
    for path in changed:
        folders[path] = folders[path].copy()
    for path in paths:
        parent, _, name = path.rpartition(b"/")
        del folders[parent].files[name]
    rewritten = {path: content for path, content in held.rewritten.items() if path not in paths}
    return HeldManifest(seal(folders, changed), rewritten, held.read_only)


def glanced(
    tree: TreeFolder, held: HeldManifest, aside: Callable[[bytes], None], stopped: Callable[[], bool]
) -> HeldManifest:
    """Compare size, time and mode of each file, and hash those that differ; return the manifest of the tree.

    Args:
        aside: moves away a file that a rank has changed.
        stopped: if true, ``InterruptedError`` is raised soon.
    """
    changed: list[bytes] = []
    for path, folder in held.manifest.folders.items():
        if stopped():
            raise InterruptedError
        try:
            fd = tree.folder(path)
        except OSError:
            return examined(tree, [held], aside, unfinished=False, stopped=stopped)
        for name, entry in folder.files.items():
            content = held.content(entry_path(path, name), entry)
            try:
                about = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                changed.append(entry_path(path, name))
                continue
            size = content[1] if content is not None else -1
            if (about.st_mtime_ns, about.st_size) == (entry.mtime, size) and about.st_mode == held.mode(entry) | _FILE:
                continue
            if not stat.S_ISREG(about.st_mode) or _match(fd, name, entry_path(path, name), [(held, folder)]) is None:
                aside(entry_path(path, name))
                changed.append(entry_path(path, name))
    return without(held, set(changed)) if changed else held


_FILE = stat.S_IFREG


def examined(
    tree: TreeFolder,
    candidates: Sequence[HeldManifest],
    aside: Callable[[bytes], None],
    *,
    unfinished: bool,
    stopped: Callable[[], bool] = lambda: False,
) -> HeldManifest:
    """Hash all files of a tree that some manifests name; return the manifest of the tree.

    Args:
        candidates: the manifests that it may match, most likely first.
        aside: moves away a path that a rank may have created.
        unfinished: whether files with wrong content are half-written files of the store, which are removed; otherwise
            they are moved away.
        stopped: if true, ``InterruptedError`` is raised soon.
    """
    folders: dict[bytes, Folder] = {}
    rewritten: dict[bytes, tuple[bytes, int]] = {}
    todo = [b""]
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        while todo:
            if stopped():
                raise InterruptedError
            path = todo.pop()
            fd = tree.folder(path)
            here = [(held, held.manifest.folders[path]) for held in candidates if path in held.manifest.folders]
            folder = folders[path] = Folder(stat.S_IMODE(os.fstat(fd).st_mode), {}, {}, {})
            files: list[bytes] = []
            for name in tree.names(path):
                if not _named(name, here):
                    continue
                about = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(about.st_mode) and any(name in each.folders for _, each in here):
                    folder.folders[name] = b""
                    todo.append(entry_path(path, name))
                elif stat.S_ISREG(about.st_mode) and any(name in each.files for _, each in here):
                    files.append(name)
                elif stat.S_ISLNK(about.st_mode) and _is_link(fd, name, here):
                    folder.links[name] = os.fsencode(os.readlink(name, dir_fd=fd))
                else:
                    aside(entry_path(path, name))

            def match(
                name: bytes, path: bytes = path, fd: int = fd, here: Sequence[tuple[HeldManifest, Folder]] = here
            ) -> tuple[FileEntry, tuple[bytes, int]] | None:
                return _match(fd, name, entry_path(path, name), here)

            for name, found in zip(files, pool.map(match, files) if len(files) > _FEW else map(match, files)):
                whole = entry_path(path, name)
                if found is not None:
                    folder.files[name], content = found
                    if found[0].rewrite is not None:
                        rewritten[whole] = content
                elif unfinished:
                    tree.unlink(whole)
                else:
                    aside(whole)
    return HeldManifest(seal(folders), rewritten, candidates[0].read_only if candidates else False)


def _is_link(fd: int, name: bytes, here: Sequence[tuple[HeldManifest, Folder]]) -> bool:
    target = os.fsencode(os.readlink(name, dir_fd=fd))
    return any(folder.links.get(name) == target for _, folder in here)


def _named(name: bytes, here: Sequence[tuple[HeldManifest, Folder]]) -> bool:
    return any(name in each.files or name in each.links or name in each.folders for _, each in here)


def _match(
    fd: int, name: bytes, path: bytes, here: Sequence[tuple[HeldManifest, Folder]]
) -> tuple[FileEntry, tuple[bytes, int]] | None:
    """Return the entry that matches a file, and its content on this host."""
    found: tuple[bytes, int] | None = None
    for held, folder in here:
        entry = folder.files.get(name)
        if entry is None:
            continue
        content = held.content(path, entry)
        if content is None:
            continue
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        except OSError:
            return None
        with Descriptor(file):
            about = os.fstat(file)
            if about.st_size != content[1]:
                continue
            if found is None:
                found = digest_of_file(file), about.st_size
            if found != content:
                continue
            if about.st_mode & MODE_BITS != held.mode(entry):
                os.fchmod(file, held.mode(entry))
            if about.st_mtime_ns != entry.mtime:
                os.utime(file, ns=(entry.mtime, entry.mtime))
            return entry, content
    return None
