"""Copy files by the cheapest way that a file system offers: reflinks, hard links, bytes."""

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
#: How much of a large file is read at once, and hashed by several threads (bytes).
_LARGE = 4 << 20


@dataclass(frozen=True)
class Facts:
    """Capabilities of the file system of a store.

    Attributes:
        free: bytes that this user may still write.
        reflink: files can share their bytes until one of them is written to.
        hard_links: files without write permission cannot be written to by processes of this user, so two trees may
            share one.
        case_insensitive: names that differ only in case are one name.
        longest: the longest name (bytes).
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
    """Return whether processes of this user write to files whose mode forbids it, as root does."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_DAC_OVERRIDE & 1)
    return True


def reflink(source: int, target: int) -> bool:
    """Let a file share all bytes of another one; returns whether the file system can."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
            raise
        return False
    return True


def digest_of_file(fd: int) -> bytes:
    """The digest of a file's content. (Read, not mapped: a rank may cut the file off meanwhile.)"""
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
    """Give a new file the content of another one.

    Args:
        source: a descriptor to read from.
        target: a descriptor of an empty file.
        size: the size that the content should have; nothing beyond it is read, but one byte.
        shares: whether to try a reflink.

    Returns:
        The digest of what was written.
    """
    if shares and size and reflink(source, target):
        return digest_of_file(target)
    h = blake3()
    offset = 0
    buffer = thread_buffer()
    while offset <= size:  # what is longer is not what it should be
        wanted = min(BUFFER, size + 1 - offset)
        count = os.preadv(source, [buffer[:wanted]], offset)
        h.update(buffer[:count])
        write_all(target, buffer[:count], offset)
        offset += count
        if count < wanted:
            break  # its end
    return h.digest()


def umask() -> int:
    """The mode bits that new files of this process lack."""
    with open("/proc/self/status") as file:  # umask() itself would set it
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o777)
