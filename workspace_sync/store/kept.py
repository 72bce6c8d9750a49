"""Keep files created by ranks when a tree is switched; list and remove them when a workspace is forgotten."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from monarch_kernel.private_files import PrivateFolder
from workspace_sync.model.manifest import Folder, Manifest, entry_path, printable
from workspace_sync.store.tree import CACHES, TreeFolder, folder_time

# Find the folders and files that processes of this user use on this host.


def resolved(fd: int) -> bytes:
    """Return the path of an open folder, without links, as the kernel shows it for other processes."""
    return os.readlink(b"/proc/self/fd/%d" % fd)


def working_folders() -> set[bytes]:
    """Return the working directories of processes."""
    return {folder for process in _processes() if (folder := _folder_of(process))}


def open_files(below: bytes) -> set[bytes]:
    """Return the files below a folder that other processes have open or mapped.

    Args:
        below: the folder (``resolved``).
    """
    own = b"/proc/%d" % os.getpid()
    return {path for process in _processes() if process != own for path in _files_of(process, below + b"/")}


def users_of(below: bytes) -> list[str]:
    """Describe the other processes that work in a folder, or have files in it open or mapped, for messages.

    Args:
        below: the folder (``resolved``).
    """
    found: list[str] = []
    inside = below + b"/"
    for process in _processes():
        pid = int(process.rpartition(b"/")[2])
        uses = pid != os.getpid() and (_folder_of(process).startswith(inside) or _files_of(process, inside))
        if uses:
            found.append(f"process {pid} ({_command(process)})")
    return found


def _folder_of(process: bytes) -> bytes:
    """Return the working directory of a process; empty if it has ended or belongs to another user."""
    try:
        return os.readlink(process + b"/cwd")
    except OSError:
        return b""


def _files_of(process: bytes, inside: bytes) -> set[bytes]:
    """Return the files with a path prefix that a process has open or mapped, as far as this user can see them."""
    found: set[bytes] = set()
    try:
        with open(process + b"/maps", "rb") as maps:
            found.update(line[at:].rstrip(b"\n") for line in maps if (at := line.find(inside)) >= 0)
        for name in os.listdir(process + b"/fd"):
            try:
                found.add(os.readlink(process + b"/fd/" + name))
            except OSError:
                continue
    except OSError:
        pass
    return {path for path in found if path.startswith(inside)}


def _command(process: bytes) -> str:
    try:
        with open(process + b"/cmdline", "rb") as file:
            words = file.read(4096).decode("utf-8", "replace").split("\0")
    except OSError:
        return "it has just ended"
    said = " ".join([os.path.basename(words[0]), *words[1:]]).strip()
    return said if len(said) <= 60 else said[:59] + "…"


def _processes() -> list[bytes]:
    return [b"/proc/" + os.fsencode(name) for name in os.listdir("/proc") if name.isdigit()]


def strays(tree: TreeFolder, manifest: Manifest) -> Iterator[bytes]:
    """Iterate over the paths in a tree that its manifest does not list, without caches; a folder is one path.

    Only folders that were changed since the creation of the tree are read.
    """
    for path, folder in manifest.folders.items():
        if path.rpartition(b"/")[2] in CACHES:
            continue
        try:
            about = os.stat(path, dir_fd=tree.fd, follow_symlinks=False) if path else os.stat(tree.fd)
            if about.st_mtime_ns == folder_time(folder.digest):
                continue
        except OSError as e:
            if e.errno != errno.ENAMETOOLONG:
                continue  # a rank has removed it
        yield from strays_in(tree, path, folder)


def strays_in(tree: TreeFolder, path: bytes, folder: Folder) -> Iterator[bytes]:
    """Do the same for one folder."""
    try:
        names = tree.names(path)
    except OSError:
        return  # a rank has removed or replaced it; a replacement is a stray of the parent folder
    for name in names:
        if name in folder.files or name in folder.links or name in folder.folders or name in CACHES:
            continue
        yield entry_path(path, name)


class Keeper:
    """Moves files of ranks into the next tree, or into a folder ``kept``.

    Args:
        tree: the folder ``kept`` of a workspace, created at first use.
        label: the name of a folder in it for everything that is kept now.
    """

    def __init__(self, tree: TreeFolder, label: str) -> None:
        self.tree = tree
        self._label = os.fsencode(label)
        #: Paths moved to the new tree.
        self.moved: list[str] = []
        #: Paths that conflict with the new tree, and their new locations.
        self.kept: list[str] = []

    def move(self, part: str, source: TreeFolder, path: bytes, target: TreeFolder, manifest: Manifest) -> None:
        """Move a path to the same place in another tree; folders that exist in both are merged.

        Args:
            manifest: of the target; its entries are not replaced.
        """
        about = source.stat(path)
        if about is None:
            return
        there = target.stat(path)
        ours = _names(manifest, path)
        if there is None and not ours:
            try:
                target.make_folders(path.rpartition(b"/")[0])
                _rename(source, path, target, path)
            except (FileNotFoundError, NotADirectoryError, FileExistsError):
                self.keep(part, source, path)
                return
            self.moved.append(f"{part}/{printable(path)}")
        elif there is not None and stat.S_ISDIR(about.st_mode) and stat.S_ISDIR(there.st_mode):
            for name in source.names(path):
                if name not in CACHES:
                    self.move(part, source, entry_path(path, name), target, manifest)
            source.remove_folder(path)
        else:
            self.keep(part, source, path)

    def keep(self, part: str, source: TreeFolder, path: bytes) -> None:
        """Move a path into the folder ``kept``."""
        place = b"/".join((self._label, os.fsencode(part), path))
        while self.tree.stat(place) is not None:
            place += b"~"
        self.tree.make_folders(place.rpartition(b"/")[0])
        _rename(source, path, self.tree, place)
        self.kept.append(f"{part}/{printable(path)}: {self.tree.path}/{printable(place)}")


def _names(manifest: Manifest, path: bytes) -> bool:
    parent, _, name = path.rpartition(b"/")
    folder = manifest.folders.get(parent)
    return folder is not None and (name in folder.files or name in folder.links or name in folder.folders)


def _rename(source: TreeFolder, path: bytes, target: TreeFolder, place: bytes) -> None:
    source.forget(path)
    a, name = source.place(path)
    b, new = target.place(place)
    os.rename(name, new, src_dir_fd=a, dst_dir_fd=b)


@dataclass
class Inventory:
    """Files and folders found below a folder.

    Attributes:
        files: the inode of each file and link, by path.
        folders: the folders, parents first.
        size: the total size of all files (bytes).
    """

    files: dict[bytes, int] = field(default_factory=dict[bytes, int])
    folders: list[bytes] = field(default_factory=list[bytes])
    size: int = 0


class Footprint(msgspec.Struct, array_like=True):
    """Content of a workspace on a host.

    Attributes:
        generations: the number of generations that a rollback can go to, including the current one.
        files: the number of files in its trees.
        size: their total size (bytes). Trees may share bytes.
        kept_files: the number of kept files of ranks, which were in conflict with a tree or in a forgotten tree.
        kept_size: their total size (bytes).
        users: the processes of this user that use the trees, for messages.
    """

    generations: int = 0
    files: int = 0
    size: int = 0
    kept_files: int = 0
    kept_size: int = 0
    users: list[str] = []


def inventory(tree: TreeFolder) -> Inventory:
    """List all files and folders below a folder, without following links."""
    found = Inventory()
    todo = [b""]
    while todo:
        folder = todo.pop()
        try:
            names = tree.names(folder)
        except OSError:
            continue  # it has just been removed or replaced
        for name in names:
            path = entry_path(folder, name)
            about = tree.stat(path)
            if about is None:
                continue
            if stat.S_ISDIR(about.st_mode):
                found.folders.append(path)
                todo.append(path)
            else:
                found.files[path] = about.st_ino
                found.size += about.st_size
    return found


def remove(tree: TreeFolder, listed: Inventory) -> tuple[int, int]:
    """Remove the files of an inventory that are unchanged and that no process has open.

    Returns:
        The number of removed files, and their size (bytes).
    """
    used = open_files(resolved(tree.fd))
    here = resolved(tree.fd)
    files = size = 0
    for folder in listed.folders:
        about = tree.stat(folder)
        if about is not None and about.st_mode & 0o300 != 0o300:
            parent, name = tree.place(folder)
            os.chmod(name, 0o700, dir_fd=parent)
    for path, inode in listed.files.items():
        about = tree.stat(path)
        if about is not None and about.st_ino == inode and b"%b/%b" % (here, path) not in used:
            tree.unlink(path)
            files += 1
            size += about.st_size
    for folder in reversed(listed.folders):
        tree.remove_folder(folder)
    return files, size


def kept_tree(workspace: PrivateFolder) -> TreeFolder | None:
    """Return the folder ``kept`` of a workspace; None if nothing was kept."""
    try:
        return TreeFolder.open(f"{workspace.path}/kept", "kept", workspace.fd)
    except FileNotFoundError:
        return None
