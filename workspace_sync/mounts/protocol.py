"""Implement the kernel's FUSE protocol for a read-only file system: requests from ``/dev/fuse``, and their answers.

Why not libfuse: its bindings that need no compiler (mfusepy, fusepy) have the high-level interface, in which a path has
one inode, and an inode one page cache. A reader of the old version of a file would get pages of the new version. Here,
a new version is a new inode. The protocol is a stable interface of the kernel, and needs no library.

Source: ``linux/fuse.h``; https://docs.kernel.org/filesystems/fuse.html.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview

_IN = struct.Struct("=IIQQIIIHH")
_OUT = struct.Struct("=IiQ")
_ATTR = struct.Struct("=6Q10I")
_ENTRY = struct.Struct("=4Q2I")
_ATTR_OUT = struct.Struct("=QII")
_INIT_IN = struct.Struct("=4I")
_INIT_OUT = struct.Struct("=4I2H2I2HI28x")
_OPEN_OUT = struct.Struct("=QII")
_READ_IN = struct.Struct("=QQI")
_U64 = struct.Struct("=Q")
_FORGET_ONE = struct.Struct("=QQ")
_DIRENT = struct.Struct("=QQII")
_STATFS = struct.Struct("=5Q4I24x")
_INVAL_INODE = struct.Struct("=Qqq")
_INVAL_ENTRY = struct.Struct("=QII")

_LOOKUP, _FORGET, _GETATTR, _READLINK = 1, 2, 3, 5
_OPEN, _READ, _STATFS_OP, _RELEASE = 14, 15, 17, 18
_INIT, _OPENDIR, _READDIR, _RELEASEDIR = 26, 27, 28, 29
_INTERRUPT, _DESTROY, _BATCH_FORGET, _READDIRPLUS = 36, 38, 42, 44
_NOTIFY_INODE, _NOTIFY_ENTRY = 2, 3

_ASYNC_READ, _AUTO_INVAL_DATA, _DO_READDIRPLUS, _READDIRPLUS_AUTO = 1 << 0, 1 << 12, 1 << 13, 1 << 14
_NO_OPEN_SUPPORT, _PARALLEL_DIROPS, _ABORT_ERROR, _MAX_PAGES = 1 << 17, 1 << 18, 1 << 21, 1 << 22
_CACHE_SYMLINKS, _NO_OPENDIR_SUPPORT, _EXPLICIT_INVAL_DATA = 1 << 23, 1 << 24, 1 << 25

#: The time limit for the kernel to initialize a new mount (seconds).
GREETING = 10.0

_MAJOR, _MINOR = 7, 31
#: The number of threads that answer the requests of one mount.
_THREADS = 4
#: The maximum size of a read by the kernel (pages).
_PAGES = 256
#: The kernel requires a buffer for the largest write, even on read-only mounts (bytes).
_REQUEST_SIZE = 16384
_FOREVER = 1 << 40

_DIRECT_IO = 1 << 0

ROOT = 1


@dataclass(frozen=True, slots=True)
class Attributes:
    """Result of ``stat`` for an inode. ``mode`` includes the kind; times are in ns."""

    inode: int
    mode: int
    size: int = 0
    mtime: int = 0
    links: int = 1

    def packed(self, uid: int, gid: int) -> bytes:
        seconds, ns = divmod(self.mtime, 10**9)
        seconds &= (1 << 64) - 1
        blocks = (self.size + 511) // 512
        times = (seconds, seconds, seconds, ns, ns, ns)
        return _ATTR.pack(self.inode, self.size, blocks, *times, self.mode, self.links, uid, gid, 0, 4096, 0)


@dataclass(frozen=True, slots=True)
class Entered:
    """Answer to a lookup. An inode of 0 means that the name does not exist.

    Attributes:
        node: the number of the inode, valid until the kernel forgets it.
        attributes: of the inode.
    """

    node: int
    attributes: Attributes | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry of a folder: its name, the inode number and the mode that ``readdir`` shows."""

    name: bytes
    inode: int
    mode: int


class Filesystem(Protocol):
    """File system served by a session. Each method answers its request at once, or later from any thread."""

    def lookup(self, request: Request, parent: int, name: bytes) -> None: ...
    def getattr(self, request: Request, node: int) -> None: ...
    def readlink(self, request: Request, node: int) -> None: ...
    def open(self, request: Request, node: int) -> None: ...
    def release(self, handle: int) -> None: ...
    def read(self, request: Request, node: int, handle: int, offset: int, size: int) -> None: ...
    def opendir(self, request: Request, node: int) -> None: ...
    def readdir(self, request: Request, node: int, handle: int, offset: int, size: int, plus: bool) -> None: ...
    def releasedir(self, handle: int) -> None: ...
    def statfs(self, request: Request) -> None: ...
    def forget(self, node: int, count: int) -> None: ...


class Request:
    """A request of the kernel. Only the first answer counts.

    Attributes:
        cancelled: if set, called when the waiting thread is killed.
        interrupted: whether the waiting thread has received a signal.
    """

    __slots__ = ("_pid", "_session", "_unique", "began", "cancelled", "interrupted")

    def __init__(self, session: FuseSession, unique: int, pid: int) -> None:
        self._session = session
        self._unique = unique
        self._pid = pid
        self.interrupted = False
        self.began = time.monotonic()
        self.cancelled: Callable[[], None] | None = None

    def fail(self, number: int) -> None:
        """Answer with an error number."""
        self._session._answer(self._unique, -number, ())

    def data(self, *buffers: Buffer) -> None:
        """Answer with bytes: content of a file, or the target of a link."""
        self._session._answer(self._unique, 0, buffers)

    def found(self, found: Entered) -> None:
        """Answer a lookup."""
        self.data(self._session._entry(found))

    def attributes(self, attributes: Attributes) -> None:
        """Answer ``getattr``."""
        session = self._session
        self.data(_ATTR_OUT.pack(*session._attr_valid, 0), attributes.packed(session._uid, session._gid))

    @property
    def process(self) -> int:
        """The process that made the request; 0 if it is in another namespace."""
        try:
            with open(f"/proc/{self._pid}/status", encoding="utf-8", errors="replace") as file:
                return next((int(line.split()[1]) for line in file if line.startswith("Tgid:")), 0)
        except OSError:
            return 0

    def opened(self, handle: int, direct: bool = False) -> None:
        """Answer ``open`` or ``opendir``; ``direct``: without page cache, so it cannot be mapped (shared)."""
        self.data(_OPEN_OUT.pack(handle, _DIRECT_IO if direct else 0, 0))

    def entries(self, entries: Sequence[Listed], offset: int, size: int) -> None:
        """Answer ``readdir`` with as many entries from number ``offset`` on as fit into ``size`` bytes."""
        out = bytearray()
        for number in range(offset, len(entries)):
            each = entries[number]
            padding = -len(each.name) % 8
            if len(out) + _DIRENT.size + len(each.name) + padding > size:
                break
            out += _DIRENT.pack(each.inode, number + 1, len(each.name), each.mode >> 12)
            out += each.name + bytes(padding)
        self.data(out)

    def entries_plus(
        self, entries: Sequence[Listed], offset: int, size: int, find: Callable[[Listed], Entered]
    ) -> None:
        """Answer ``readdirplus``: as ``entries``, with the lookup result of each entry; ``find`` counts as a lookup."""
        out = bytearray()
        for number in range(offset, len(entries)):
            each = entries[number]
            padding = -len(each.name) % 8
            if len(out) + _ENTRY.size + _ATTR.size + _DIRENT.size + len(each.name) + padding > size:
                break
            found = Entered(0) if each.name in (b".", b"..") else find(each)
            out += self._session._entry(found)
            out += _DIRENT.pack(each.inode, number + 1, len(each.name), each.mode >> 12)
            out += each.name + bytes(padding)
        self.data(out)

    def space(self, total: int, free: int, files: int) -> None:
        """Answer ``statfs``: total and free bytes, and the number of files."""
        self.data(_STATFS.pack(total // 4096, free // 4096, free // 4096, files, 0, 4096, 255, 4096, 0))

    def end_if_killed(self) -> None:
        """Answer if the waiting thread is being killed, since it cannot end before it gets an answer.

        After other signals the wait continues: the thread would take an error for a failure of the file (SIGBUS for
        mapped memory).
        """
        if _is_killed(self._pid):
            self.fail(errno.EINTR)
            if self.cancelled is not None:
                self.cancelled()

    def later(self) -> None:
        """Announce that another thread will answer. The request can then be interrupted, and has a deadline."""
        self._session._wait_for(self)


@dataclass
class Caching:
    """Lifetime of the kernel's caches.

    Attributes:
        names: the lifetime of names (seconds); None: until they are invalidated.
        contents: whether the content of an inode never changes, so that the kernel need not even request ``open``.
    """

    names: float | None
    contents: bool
    _valid: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        seconds = self.names
        self._valid = (_FOREVER, 0) if seconds is None else (int(seconds), int(seconds % 1 * 1e9))


class FuseSession:
    """Server of one mount, with several threads, until it is unmounted.

    Args:
        device: the descriptor of ``/dev/fuse`` that was mounted; the session closes it at the end.
        filesystem: answers the requests.
        caching: what the kernel may cache.
        deadline: the time limit of an answer (seconds), after which the request fails with EIO.
    """

    def __init__(
        self,
        device: int,
        filesystem: Filesystem,
        caching: Caching,
        deadline: float = 60.0,
    ) -> None:
        self._device = device
        self._filesystem = filesystem
        self._caching = caching
        self._attr_valid = caching._valid
        self._deadline = deadline
        self._uid, self._gid = os.geteuid(), os.getegid()
        self._waiting: dict[int, Request] = {}
        self._ready = threading.Event()
        self._over = threading.Event()
        self._left = _THREADS
        self._lock = threading.Lock()
        self._handlers: dict[int, Callable[[Request, int, memoryview], None]] = {
            _LOOKUP: lambda r, node, body: filesystem.lookup(r, node, bytes(body[:-1])),
            _GETATTR: lambda r, node, _: filesystem.getattr(r, node),
            _READLINK: lambda r, node, _: filesystem.readlink(r, node),
            _OPEN: lambda r, node, _: filesystem.open(r, node),
            _READ: self._read,
            _OPENDIR: lambda r, node, _: filesystem.opendir(r, node),
            _READDIR: lambda r, node, body: self._readdir(r, node, body, False),
            _READDIRPLUS: lambda r, node, body: self._readdir(r, node, body, True),
            _STATFS_OP: lambda r, _node, _body: filesystem.statfs(r),
            _RELEASE: lambda r, _, body: self._release(r, body, filesystem.release),
            _RELEASEDIR: lambda r, _, body: self._release(r, body, filesystem.releasedir),
        }
        for number in range(_THREADS):
            threading.Thread(target=self._serve, name=f"fuse-{number}", daemon=True).start()
        threading.Thread(target=self._watch, name="fuse-deadlines", daemon=True).start()

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the kernel and this session have negotiated the protocol."""
        return self._ready.wait(timeout)

    @property
    def over(self) -> bool:
        """Whether the mount has ended."""
        return self._over.is_set()

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """Make the kernel forget a name in a folder. Not for threads of this session."""
        self._notify(_NOTIFY_ENTRY, _INVAL_ENTRY.pack(parent, len(name), 0), name, b"\0")

    def invalidate_node(self, node: int) -> None:
        """Make the kernel forget the attributes and content of an inode. Not for threads of this session."""
        self._notify(_NOTIFY_INODE, _INVAL_INODE.pack(node, 0, 0))

    # -- requests --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                data = os.read(self._device, _REQUEST_SIZE)
            except OSError as e:
                if e.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # ENOENT: interrupted before it was read
                    continue
                if e.errno not in (errno.ENODEV, errno.ECONNABORTED, errno.EBADF):
                    log.error("reading from /dev/fuse failed: %s", e)
                break
            if not data:
                break
            self._dispatch(memoryview(data))
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._over.set()
            os.close(self._device)

    def _dispatch(self, data: memoryview) -> None:
        length, opcode, unique, node, _uid, _gid, pid, _, _ = _IN.unpack_from(data)
        body = data[_IN.size : length]
        if opcode == _FORGET:
            self._filesystem.forget(node, _U64.unpack_from(body)[0])
        elif opcode == _BATCH_FORGET:
            for each, count in _FORGET_ONE.iter_unpack(body[8:]):
                self._filesystem.forget(each, count)
        elif opcode == _INTERRUPT:
            self._interrupt(unique, _U64.unpack_from(body)[0])
        elif opcode == _INIT:
            self._init(unique, body)
        else:
            request = Request(self, unique, pid)
            handler = self._handlers.get(opcode)
            if handler is None:
                request.fail(0 if opcode == _DESTROY else errno.ENOSYS)
                return
            try:
                handler(request, node, body)
            except OSError as e:
                request.fail(e.errno or errno.EIO)
            except Exception:
                log.exception("request %d for inode %d failed", opcode, node)
                request.fail(errno.EIO)

    def _init(self, unique: int, body: memoryview) -> None:
        major, minor, readahead, offered = _INIT_IN.unpack_from(body)
        if major != _MAJOR or minor < _MINOR:
            log.error("the kernel speaks FUSE %d.%d, and %d.%d is needed", major, minor, _MAJOR, _MINOR)
            self._answer(unique, -errno.EPROTO, ())
            return
        flags = _ASYNC_READ | _PARALLEL_DIROPS | _ABORT_ERROR | _MAX_PAGES | _DO_READDIRPLUS | _READDIRPLUS_AUTO
        if self._caching.contents:
            flags |= _NO_OPEN_SUPPORT | _NO_OPENDIR_SUPPORT | _EXPLICIT_INVAL_DATA | _CACHE_SYMLINKS
        else:
            flags |= _AUTO_INVAL_DATA
        answer = _INIT_OUT.pack(_MAJOR, _MINOR, readahead, flags & offered, 64, 48, 4096, 1, _PAGES, 0, 0)
        self._answer(unique, 0, (answer,))
        self._ready.set()

    def _read(self, request: Request, node: int, body: memoryview) -> None:
        handle, offset, size = _READ_IN.unpack_from(body)
        self._filesystem.read(request, node, handle, offset, size)

    def _readdir(self, request: Request, node: int, body: memoryview, plus: bool) -> None:
        handle, offset, size = _READ_IN.unpack_from(body)
        self._filesystem.readdir(request, node, handle, offset, size, plus)

    def _release(self, request: Request, body: memoryview, release: Callable[[int], None]) -> None:
        release(_U64.unpack_from(body)[0])
        request.data()

    # -- answers ---------------------------------------------------------------------------------------

    def _entry(self, found: Entered) -> bytes:
        about = found.attributes
        packed = bytes(_ATTR.size) if about is None else about.packed(self._uid, self._gid)
        seconds, ns = self._attr_valid
        return _ENTRY.pack(found.node, 0, seconds, seconds, ns, ns) + packed

    def _answer(self, unique: int, error: int, buffers: Iterable[Buffer]) -> None:
        self._waiting.pop(unique, None)
        parts = [memoryview(part).cast("B") for part in buffers if len(part)]
        header = _OUT.pack(_OUT.size + sum(map(len, parts)), error, unique)
        try:
            os.writev(self._device, [header, *parts])
        except OSError as e:
            # ENOENT: the waiting process was killed, or another thread has answered; the others: unmounted.
            if e.errno not in (errno.ENOENT, errno.ENODEV, errno.EBADF, errno.ECONNABORTED):
                log.error("answering to /dev/fuse failed: %s", e)
                if error == 0:
                    self._answer(unique, -errno.EIO, ())

    def _notify(self, code: int, *parts: bytes) -> None:
        header = _OUT.pack(_OUT.size + sum(map(len, parts)), code, 0)
        try:
            os.writev(self._device, [header, *parts])
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ENODEV, errno.EBADF, errno.ENOTDIR):  # unknown to the kernel
                raise

    # -- answers that come later -----------------------------------------------------------------------

    def _wait_for(self, request: Request) -> None:
        self._waiting[request._unique] = request

    def _interrupt(self, unique: int, of: int) -> None:
        request = self._waiting.get(of)
        if request is None:
            self._answer(unique, -errno.EAGAIN, ())  # not begun yet: the kernel repeats it; answered: it ignores this
            return
        request.interrupted = True  # the kernel reports only the first signal
        request.end_if_killed()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._deadline)):
            late = time.monotonic() - self._deadline
            for request in list(self._waiting.values()):
                if request.began < late:
                    request.fail(errno.EIO)
                elif request.interrupted:
                    request.end_if_killed()


def _is_killed(thread: int) -> bool:
    """Return whether a thread has ended or has a pending SIGKILL; every fatal signal becomes SIGKILL."""
    try:
        with open(f"/proc/{thread}/status", encoding="utf-8", errors="replace") as file:
            pending = [int(line.split()[1], 16) for line in file if line.startswith(("SigPnd:", "ShdPnd:"))]
    except OSError:
        return thread != 0  # 0: it is in another namespace
    return any(signals & 1 << (signal.SIGKILL - 1) for signals in pending)


# -- inodes ---------------------------------------------------------------------------------------


class Inode(Protocol):
    """An inode in a table.

    Attributes:
        number: its number in the kernel's requests.
        lookups: the number of lookups by the kernel that it has not yet forgotten.
    """

    number: int
    lookups: int


N = TypeVar("N", bound=Inode)
K = TypeVar("K")


class InodeTable(Generic[K, N]):
    """Inodes by number and by the object that each represents. The owner of the table locks it.

    Args:
        key_of: returns the object that an inode represents.
        root: the inode with the number ``ROOT``, which is never forgotten; None: the owner handles the root without an
            inode.

    Source: ``FUSE_LOOKUP`` and ``FUSE_FORGET`` in ``linux/fuse.h``.
    """

    def __init__(self, key_of: Callable[[N], K], root: N | None) -> None:
        self._key_of = key_of
        self._numbers = itertools.count(ROOT + 1)
        self.by_number: dict[int, N] = {}
        self.by_key: dict[K, N] = {}
        if root is not None:
            self.by_number[ROOT] = self.by_key[key_of(root)] = root

    def enter(self, key: K, make: Callable[[int], N]) -> N:
        """Count a lookup, and return the inode of a key; create it with the next number if there is none."""
        node = self.by_key.get(key)
        if node is None:
            node = make(next(self._numbers))
            self.by_number[node.number] = self.by_key[key] = node
        node.lookups += 1
        return node

    def forget(self, number: int, count: int) -> None:
        """Subtract lookups that the kernel has forgotten; drop an inode without lookups."""
        node = self.by_number.get(number)
        if node is None or number == ROOT:
            return
        node.lookups -= count
        if node.lookups <= 0:
            del self.by_number[number]
            del self.by_key[self._key_of(node)]
