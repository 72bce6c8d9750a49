"""Content by digest that is in no tree: files that have left a tree, and replaced pieces of large files."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator

from monarch_kernel.private_files import PrivateFolder
from workspace_sync.model.manifest import DIGEST_SIZE
from workspace_sync.store.tree import Descriptor

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Folder of objects that are being written; each writer holds a lock (``flock``) on its object.
_NEW = "new"


class Objects:
    """The folder ``objects`` of a store, used by several processes at once. Objects are added and removed by renaming.

    The name of an object is the expected digest of its content. Every user of an object verifies the digest.
    """

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder

    @property
    def path(self) -> str:
        """The path of the folder, for messages."""
        return self._folder.path

    def path_of(self, digest: bytes) -> str:
        """Return the path of an object, for messages."""
        return f"{self._folder.path}/{_name(digest)}"

    def close(self) -> None:
        """Close the folder's descriptor."""
        self._folder.close()

    def open(self, digest: bytes) -> int | None:
        """Open an object for reading; return None if there is none."""
        try:
            return os.open(_name(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder.fd)
        except OSError as e:
            if e.errno in (errno.ENOENT, errno.ELOOP):
                return None
            raise

    def take_in(self, digest: bytes, folder: int, name: bytes) -> None:
        """Move a file into the objects, replacing an existing one. The object counts as new and is not collected soon.

        Args:
            digest: the presumed digest of its content.
            folder: a descriptor of its folder.
            name: its name in the folder.
        """
        target = _name(digest)
        try:
            os.rename(name, target, src_dir_fd=folder, dst_dir_fd=self._folder.fd)
        except FileNotFoundError:
            self._make(target)
            os.rename(name, target, src_dir_fd=folder, dst_dir_fd=self._folder.fd)
        try:
            # If both names refer to the same file, rename() keeps both.
            if self._same(target, folder, name):
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass

    def _same(self, target: str, folder: int, name: bytes) -> bool:
        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return os.path.samestat(there, os.stat(target, dir_fd=self._folder.fd, follow_symlinks=False))

    def give_back(self, digest: bytes, folder: int, name: bytes) -> None:
        """Move an object into a folder."""
        os.rename(_name(digest), name, src_dir_fd=self._folder.fd, dst_dir_fd=folder)

    def write(self, digest: bytes, data: memoryview | bytes) -> None:
        """Store some content unless it is already stored."""
        target = _name(digest)
        try:
            os.stat(target, dir_fd=self._folder.fd, follow_symlinks=False)
            return
        except FileNotFoundError:
            pass
        self._make(target)
        fd, new = self._begin()
        try:
            write_all(fd, data, 0)
            os.rename(new, target, src_dir_fd=self._folder.fd, dst_dir_fd=self._folder.fd)
        except BaseException:
            os.unlink(new, dir_fd=self._folder.fd)
            raise
        finally:
            os.close(fd)

    def _begin(self) -> tuple[int, str]:
        """Create a file for an object, locked while it is open; return its descriptor and name."""
        self._make(_NEW)
        while True:
            # Not the process id: processes of other hosts may use this store, too.
            new = f"{_NEW}/{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(new, flags, 0o600, dir_fd=self._folder.fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return fd, new
            os.close(fd)  # another process has removed it as a leftover before it was locked

    def remove(self, digest: bytes) -> None:
        """Remove an object if it exists."""
        try:
            os.unlink(_name(digest), dir_fd=self._folder.fd)
        except FileNotFoundError:
            pass

    def has_any(self) -> bool:
        """Return whether there is any object."""
        return next(self.all(), None) is not None

    def names(self) -> set[bytes]:
        """Return the digests of all objects."""
        found: set[bytes] = set()
        for inside in self._folder.names():
            try:
                names = os.listdir(f"{self._folder.path}/{inside}")
            except OSError:
                continue
            found.update(digest for name in names if (digest := _digest(inside + name)) is not None)
        return found

    def all(self) -> Iterator[tuple[bytes, os.stat_result]]:
        """Iterate over the digest and state of each object."""
        for inside, name, about in self._entries():
            digest = _digest(inside + name)
            if digest is not None and stat.S_ISREG(about.st_mode):
                yield digest, about

    def remove_unfinished(self) -> int:
        """Remove unfinished objects of killed processes, whose locks are free; return their number."""
        removed = 0
        for name in self._unfinished():
            new = f"{_NEW}/{name}"
            try:
                fd = os.open(new, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder.fd)
            except OSError:
                continue  # it has just become an object
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(new, dir_fd=self._folder.fd)
                removed += 1
            except (BlockingIOError, FileNotFoundError):
                continue
            finally:
                os.close(fd)
        return removed

    def _unfinished(self) -> list[str]:
        try:
            fd = os.open(_NEW, _FOLDER, dir_fd=self._folder.fd)
        except FileNotFoundError:
            return []
        with Descriptor(fd):
            return os.listdir(fd)

    def _entries(self) -> Iterator[tuple[str, str, os.stat_result]]:
        for inside in self._folder.names():
            if len(inside) != 2:
                continue
            try:
                fd = os.open(inside, _FOLDER, dir_fd=self._folder.fd)
            except OSError:
                continue
            with Descriptor(fd):
                for name in os.listdir(fd):
                    try:
                        about = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield inside, name, about

    def _make(self, target: str) -> None:
        try:
            os.mkdir(target.partition("/")[0], 0o700, dir_fd=self._folder.fd)
        except FileExistsError:
            pass


def _name(digest: bytes) -> str:
    text = digest.hex()
    return f"{text[:2]}/{text[2:]}"


def _digest(text: str) -> bytes | None:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_SIZE else None


def write_all(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Write some bytes at an offset of a file."""
    done = os.pwrite(fd, data, offset)
    left = memoryview(data)[done:]
    while left:
        done += os.pwrite(fd, left, offset + done)
        left = memoryview(data)[done:]
