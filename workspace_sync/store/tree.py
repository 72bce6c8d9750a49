"""Access a tree by descriptors, so that no link in it redirects a write or removal outside."""

from __future__ import annotations

import errno
import os
import stat
import threading

from workspace_sync.model.manifest import Folder

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: The number of folders that one thread keeps open in one tree.
_OPEN_FOLDERS = 64
#: Cache folders, which stay in their tree, because they are filled again.
CACHES = frozenset((b"__pycache__", b".pytest_cache", b".mypy_cache", b".ruff_cache", b".ipynb_checkpoints"))


def folder_time(digest: bytes) -> int:
    """Compute the modification time of a folder of a tree (ns) from its content.

    A folder with another time was changed since, so that files created by ranks are found by checking only folders.
    Folders of different content have different times, as Python's import system expects when a module appears.
    """
    return (1_000_000_000 + (int.from_bytes(digest[:4], "big") >> 4)) * 1_000_000_000


class Descriptor(int):
    """File descriptor that a ``with`` block closes.

    One is used for each file, so it executes little Python code.
    """

    __slots__ = ()
    __enter__ = int.__int__

    def __exit__(self, *_: object) -> None:
        os.close(self)


class TreeFolder:
    """A folder whose entries are opened component by component, never through a link. Close it after use.

    Thread-safe.

    Args:
        path: its path, for messages.
        fd: a descriptor of it, which the object takes over.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._local = threading.local()
        self._caches: list[dict[bytes, int]] = []

    @classmethod
    def open(cls, path: str, name: str, parent: int) -> TreeFolder:
        """Open a tree that is an entry of a folder."""
        return cls(path, os.open(name, _FOLDER, dir_fd=parent))

    def close(self) -> None:
        """Close all descriptors."""
        for cache in self._caches:
            for fd in cache.values():
                os.close(fd)
            cache.clear()
        os.close(self.fd)

    def __enter__(self) -> TreeFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def folder(self, path: bytes) -> int:
        """Return a descriptor of a folder, valid until this thread has requested several others."""
        if not path:
            return self.fd
        cache = self._cache()
        fd = cache.pop(path, -1)
        if fd >= 0:
            cache[path] = fd  # most recently used
            return fd
        names: list[bytes] = []
        at = path
        base = self.fd
        while at:
            if (known := cache.get(at, -1)) >= 0:
                base = known
                break
            at, _, name = at.rpartition(b"/")
            names.append(name)
        fd = base
        try:
            while names:
                below = os.open(names.pop(), _FOLDER, dir_fd=fd)
                if fd != base:
                    os.close(fd)
                fd = below
        except BaseException:
            if fd != base:
                os.close(fd)
            raise
        cache[path] = fd
        if len(cache) > _OPEN_FOLDERS:
            os.close(cache.pop(next(iter(cache))))
        return fd

    def place(self, path: bytes) -> tuple[int, bytes]:
        """Return a descriptor of the parent folder of a path, and the path's last name."""
        folder, _, name = path.rpartition(b"/")
        return self.folder(folder), name

    def forget(self, path: bytes) -> None:
        """Close this thread's descriptors of a folder and everything below it, before it is removed or moved."""
        cache = self._cache()
        inside = path + b"/"
        for each in [p for p in cache if p == path or p.startswith(inside)]:
            os.close(cache.pop(each))

    def _cache(self) -> dict[bytes, int]:
        try:
            return self._local.cache
        except AttributeError:
            cache = self._local.cache = dict[bytes, int]()
            self._caches.append(cache)
            return cache

    # -- entries ------------------------------------------------------------------------------------

    def stat(self, path: bytes) -> os.stat_result | None:
        """Return the state of a path without following a link; None if it does not exist."""
        try:
            if not path:
                return os.stat(self.fd)
            folder, name = self.place(path)
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            if e.errno == errno.ELOOP:
                return None
            raise

    def open_file(self, path: bytes) -> int:
        """Open a regular file for reading."""
        folder, name = self.place(path)
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", os.fsdecode(path))
        return fd

    def reopen(self, path: bytes) -> int:
        """Reopen a file that this process has created, to write more of it."""
        folder, name = self.place(path)
        return os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)

    def new_file(self, path: bytes, mode: int = 0o600) -> int:
        """Create a file for reading and writing."""
        folder, name = self.place(path)
        return os.open(name, _NEW_FILE, mode, dir_fd=folder)

    def make_folders(self, path: bytes) -> None:
        """Create a folder and its parents if they do not exist."""
        if not path:
            return
        try:
            folder, name = self.place(path)
        except FileNotFoundError:
            self.make_folders(path.rpartition(b"/")[0])
            folder, name = self.place(path)
        try:
            os.mkdir(name, 0o700, dir_fd=folder)
        except FileExistsError:
            pass

    def unlink(self, path: bytes) -> bool:
        """Remove a file or link; return whether there was one."""
        folder, name = self.place(path)
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return False
        return True

    def remove_folder(self, path: bytes) -> bool:
        """Remove an empty folder; return whether it is gone."""
        self.forget(path)
        try:
            folder, name = self.place(path)
            os.rmdir(name, dir_fd=folder)
        except FileNotFoundError:
            return True
        except OSError as e:
            if e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ELOOP):
                return False
            raise
        return True

    def names(self, path: bytes) -> list[bytes]:
        """Return the names in a folder."""
        return [os.fsencode(name) for name in os.listdir(self.folder(path))]

    def finish_folder(self, path: bytes, folder: Folder) -> None:
        """Set mode and time of a folder. Nothing may be added or removed in it afterwards."""
        fd = self.folder(path)
        if stat.S_IMODE(os.fstat(fd).st_mode) != folder.mode:
            os.fchmod(fd, folder.mode)
        when = folder_time(folder.digest)
        os.utime(fd, ns=(when, when))
