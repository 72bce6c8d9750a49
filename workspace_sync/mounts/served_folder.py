"""An actor that serves one folder of a host, and nothing outside it, to a gathered mount.

Paths arrive as sequences of names below the root. Each name is opened relative to its parent folder, without following
symbolic links. Neither ``..`` nor a link, even one created meanwhile, leads outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import stat
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from monarch_kernel.actor import Actor, concurrent_endpoint, endpoint
from monarch_kernel.rdma import RDMABuffer, RDMATcpFallbackWarning

_T = TypeVar("_T")

#: The size of the start of a file that the answer to ``open`` includes (bytes).
START = 32 << 10
#: The shown kinds of files. A pipe, socket or device would refer to one of the client's.
_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
_WAY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
#: The time limit for the transfer of one window (seconds).
_TRANSFER = 60.0


class Seen(NamedTuple):
    """Attributes of a file on its host; times in ns."""

    mode: int
    size: int
    mtime: int
    device: int
    inode: int
    links: int

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode, which distinguish it from another file of the same name."""
        return self.device, self.inode


class ServedFolder(Actor):
    """Query and read files below a folder. A negative result is a negated ``errno``.

    Args:
        path: the folder or file; it need not exist yet.
    """

    __tool__ = True

    def __init__(self, path: str) -> None:
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        self._root = os.path.expanduser(path)
        self._open: dict[int, int] = {}
        self._numbers = itertools.count(1)

    @concurrent_endpoint
    async def stat(self, path: bytes) -> Seen | int:
        """Return the attributes of a path; a root that does not exist is an empty folder."""
        return await _answer(self._stat, path)

    @concurrent_endpoint
    async def listing(self, path: bytes) -> list[tuple[bytes, Seen]] | int:
        """Return the entries of a folder."""
        return await _answer(self._listing, path)

    @concurrent_endpoint
    async def readlink(self, path: bytes) -> bytes | int:
        """Return the target of a link that stays within the folder; EACCES for other links."""
        return await _answer(self._readlink, path)

    @concurrent_endpoint
    async def open(self, path: bytes, identity: tuple[int, int]) -> tuple[int, bytes] | int:
        """Open a regular file; return a handle and the first ``START`` bytes. ESTALE: the path is now another file."""
        return await _answer(self._open_file, path, identity)

    @concurrent_endpoint
    async def stat_open(self, handle: int) -> Seen | int:
        """Return the current attributes of an open file."""
        return await _answer(self._stat_open, handle)

    @concurrent_endpoint
    async def read(self, handle: int, offset: int, size: int) -> bytes | int:
        """Read bytes of an open file."""
        return await _answer(self._read, handle, offset, size)

    @concurrent_endpoint
    async def read_to(self, handle: int, offset: int, size: int, memory: RDMABuffer) -> int:
        """Read bytes of an open file into memory of the caller; return their number."""
        data = await _answer(self._read, handle, offset, size)
        if isinstance(data, int):
            return data
        if data:
            await memory.write_from(data, timeout=_TRANSFER)
        return len(data)

    @endpoint
    async def close(self, handle: int) -> None:
        """Close a file."""
        descriptor = self._open.pop(handle, -1)
        if descriptor >= 0:
            os.close(descriptor)

    # -- the file system of this host ----------------------------------------------------------------------

    def _stat(self, path: bytes) -> Seen:
        with contextlib.suppress(FileNotFoundError), self._at(path) as descriptor:
            about = os.fstat(descriptor)
            if stat.S_IFMT(about.st_mode) in _KINDS:
                return _seen(about)
        if path:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return Seen(stat.S_IFDIR | 0o555, 0, 0, 0, 0, 2)

    def _stat_open(self, handle: int) -> Seen:
        return _seen(os.fstat(self._descriptor(handle)))

    def _read(self, handle: int, offset: int, size: int) -> bytes:
        return os.pread(self._descriptor(handle), size, offset)

    def _descriptor(self, handle: int) -> int:
        if handle not in self._open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._open[handle]

    def _listing(self, path: bytes) -> list[tuple[bytes, Seen]]:
        found: list[tuple[bytes, Seen]] = []
        try:
            with self._at(path) as way:
                descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=way)
                try:
                    for name in os.listdir(descriptor):
                        with contextlib.suppress(FileNotFoundError):  # it has been removed since
                            about = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                            if stat.S_IFMT(about.st_mode) in _KINDS:
                                found.append((os.fsencode(name), _seen(about)))
                finally:
                    os.close(descriptor)
        except FileNotFoundError:
            if path:
                raise
        return sorted(found)

    def _readlink(self, path: bytes) -> bytes:
        with self._at(path) as descriptor:
            target = os.readlink(b"", dir_fd=descriptor)
        inner = _inner_target(path, target, os.fsencode(self._root))
        if inner is None:
            raise PermissionError(errno.EACCES, "the link leads out of the folder")
        return inner

    def _open_file(self, path: bytes, identity: tuple[int, int]) -> tuple[int, bytes]:
        with self._at(path) as way:
            about = os.fstat(way)
            if (about.st_dev, about.st_ino) != identity:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            if not stat.S_ISREG(about.st_mode):  # opening a pipe or a device has side effects
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            descriptor = os.open(f"/proc/self/fd/{way}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            start = os.pread(descriptor, START, 0)
        except BaseException:
            os.close(descriptor)
            raise
        handle = next(self._numbers)
        self._open[handle] = descriptor
        return handle, start

    @contextmanager
    def _at(self, path: bytes) -> Generator[int]:
        """Open a path without reading it and without following links below the root."""
        descriptor = os.open(self._root, os.O_PATH | os.O_CLOEXEC)
        try:
            for name in path.split(b"/") if path else ():
                if name in (b"", b".", b".."):
                    raise OSError(errno.EINVAL, "no name of a file")
                below = os.open(name, _WAY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)


async def _answer(work: Callable[..., _T], *arguments: object) -> _T | int:
    """Run work on the file system in a thread; return a negated ``errno`` for an error."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except OSError as e:
        return -(e.errno or errno.EIO)


def _seen(about: os.stat_result) -> Seen:
    return Seen(about.st_mode, about.st_size, about.st_mtime_ns, about.st_dev, about.st_ino, about.st_nlink)


def _inner_target(path: bytes, target: bytes, root: bytes) -> bytes | None:
    """Rewrite the target of a link as a path that stays below the root on every machine; None if it leads outside.

    Args:
        path: of the link, below the root.
        target: as on the host.
        root: the folder on the host.
    """
    names = target.split(b"/")
    up = next((n for n, name in enumerate(names) if name != b".."), len(names))
    if not target.startswith(b"/") and up <= path.count(b"/") and b".." not in names[up:]:
        return target
    top = os.path.realpath(root)
    parent = os.path.dirname(os.path.join(top, path))
    real = os.path.realpath(os.path.join(parent, target))
    if real != top and not real.startswith(top.rstrip(b"/") + b"/"):
        return None
    return os.path.relpath(real, parent)
