"""What ranks have made and where: it moves along when a tree is switched, and nothing of it is removed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from workspace_sync.model.manifest import Folder, Manifest, printable
from workspace_sync.store.tree import CACHES, TreeFolder, folder_time, join


def strays(tree: TreeFolder, manifest: Manifest) -> Iterator[bytes]:
    """The paths in a tree that its manifest does not name, without caches: a folder comes whole.

    Only folders that were changed since the tree was made are read.
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
    """The same for one folder."""
    try:
        names = tree.names(path)
    except OSError:
        return  # a rank has removed it, or put something else in its place: that is a stray of the folder above
    for name in names:
        if name in folder.files or name in folder.links or name in folder.folders or name in CACHES:
            continue
        yield join(path, name)


class Keeper:
    """Moves what ranks have made out of the way: into the tree that takes over, or into a folder ``kept``.

    Args:
        tree: the folder ``kept`` of a workspace, made at first use.
        label: a folder in it, for everything that is kept at this time.
    """

    def __init__(self, tree: TreeFolder, label: str) -> None:
        self.tree = tree
        self._label = os.fsencode(label)
        #: Paths that moved to the new tree.
        self.moved: list[str] = []
        #: Paths that could not, and where they are now.
        self.kept: list[str] = []

    def move(self, part: str, source: TreeFolder, path: bytes, target: TreeFolder, manifest: Manifest) -> None:
        """Move a path to the same place in another tree; folders that exist on both sides are merged.

        Args:
            manifest: of the target, whose own entries stay.
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
                    self.move(part, source, join(path, name), target, manifest)
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
