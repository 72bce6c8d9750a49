"""Copy files in the cheapest way that a file system offers: reflinks, hard links, bytes."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from dataclasses import dataclass

from blake3 import blake3

from workspace_sync.model.manifest import BUFFER, thread_buffer
from workspace_sync.store.objects import write_all

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
