"""What a host has of a workspace before it is forgotten, and the files of ranks that were kept: listed, removed."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

from monarch_kernel.private_files import PrivateFolder
from workspace_sync.store.processes import open_files, resolved
from workspace_sync.store.tree import TreeFolder, join


@dataclass
class Inventory:
    """What is below a folder, as it was found.

    Attributes:
        files: the inode of each file and link, by path.
        folders: the folders, those above first.
        size: of all files (bytes).
    """

    files: dict[bytes, int] = field(default_factory=dict[bytes, int])
    folders: list[bytes] = field(default_factory=list[bytes])
    size: int = 0


@dataclass(frozen=True)
class Footprint:
    """What a host has of a workspace.

    Attributes:
        generations: how many a rollback can go to, the current one among them.
        files: how many files its trees have.
        size: of these (bytes). Trees may share bytes.
        kept_files: how many files of ranks were in the way of a tree and are kept.
        kept_size: of these (bytes).
        users: the processes of this user that use the trees, for messages.
    """

    generations: int
    files: int
    size: int
    kept_files: int
    kept_size: int
    users: list[str]


def inventory(tree: TreeFolder) -> Inventory:
    """All that is below a folder; links are not followed."""
    found = Inventory()
    todo = [b""]
    while todo:
        folder = todo.pop()
        try:
            names = tree.names(folder)
        except OSError:
            continue  # it has just been removed, or replaced
        for name in names:
            path = join(folder, name)
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
    """Remove what an inventory names, as far as it is still the same and no process has it open.

    Returns:
        How many files were removed, and their size (bytes).
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
    """The folder ``kept`` of a workspace; None: nothing was kept."""
    try:
        return TreeFolder.open(f"{workspace.path}/kept", "kept", workspace.fd)
    except FileNotFoundError:
        return None
