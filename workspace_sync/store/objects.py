"""Content by digest that is in no tree: files that have left a tree, and replaced pieces of large files."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from monarch_kernel.private_files import PrivateFolder
from workspace_sync.model.manifest import BUFFER, DIGEST_SIZE, thread_buffer
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


# Copy files in the cheapest way that a file system offers: reflinks, hard links, bytes.

_FICLONE = 0x40049409
_CAP_DAC_OVERRIDE = 1
#: The block size for reading a large file, which several threads hash (bytes).
_LARGE = 4 << 20


@dataclass(frozen=True)
class Facts:
    """Capabilities of the file system of a store.

    Attributes:
        free: the number of bytes that this user may still write.
        reflink: whether files can share their bytes until one of them is written to.
        hard_links: whether processes of this user cannot write to files without write permission, so that two trees may
            share a file.
        case_insensitive: whether names that differ only in case are the same name.
        longest: the maximum length of a name (bytes).
    """

    free: int
    reflink: bool
    hard_links: bool
    case_insensitive: bool
    longest: int


_probes = threading.Lock()


def probe(folder: int) -> Facts:
    """Determine the copy operations that the file system of a folder supports.

    Args:
        folder: a descriptor of a folder in which files may be created.
    """
    about = os.fstatvfs(folder)
    with _probes:
        name = f"probe-{os.getpid()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        a = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            os.pwrite(a, b"x", 0)
            case = _exists(name.upper(), folder)
            b = os.open(f"{name}-b", flags, 0o600, dir_fd=folder)
            try:
                shares = reflink(a, b)
            finally:
                os.close(b)
                os.unlink(f"{name}-b", dir_fd=folder)
        finally:
            os.close(a)
            os.unlink(name, dir_fd=folder)
    return Facts(about.f_bavail * about.f_frsize, shares, not overrides_modes(), case, about.f_namemax)


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def overrides_modes() -> bool:
    """Return whether processes of this user can write to files whose mode forbids it, as root can."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_DAC_OVERRIDE & 1)
    return True


def reflink(source: int, target: int) -> bool:
    """Make a file share all bytes of another one; return whether the file system supports it."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
            raise
        return False
    return True


def digest_of_file(fd: int) -> bytes:
    """Compute the digest of a file's content.

    The file is read and not mapped, because a rank may truncate it meanwhile.
    """
    buffer = thread_buffer()
    count = os.preadv(fd, [buffer], 0)
    if count < BUFFER:
        return blake3(buffer[:count]).digest()
    h = blake3(buffer[:count], max_threads=blake3.AUTO)
    buffer = memoryview(bytearray(_LARGE))
    offset = count
    while count := os.preadv(fd, [buffer], offset):
        h.update(buffer[:count])
        offset += count
    return h.digest()


def copy(source: int, target: int, size: int, *, shares: bool) -> bytes:
    """Copy the content of a file into a new one.

    Args:
        source: a descriptor to read from.
        target: a descriptor of an empty file.
        size: the expected size of the content; at most one byte beyond it is read.
        shares: whether to try a reflink.

    Returns:
        The digest of the written content.
    """
    if shares and size and reflink(source, target):
        return digest_of_file(target)
    h = blake3()
    offset = 0
    buffer = thread_buffer()
    while offset <= size:  # one byte more shows that the content is too long
        wanted = min(BUFFER, size + 1 - offset)
        count = os.preadv(source, [buffer[:wanted]], offset)
        h.update(buffer[:count])
        write_all(target, buffer[:count], offset)
        offset += count
        if count < wanted:
            break  # end of file
    return h.digest()


def umask() -> int:
    """Return the mode bits that new files of this process lack."""
    with open("/proc/self/status") as file:  # umask() itself would change it
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o777)
