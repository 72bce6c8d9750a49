"""Serve a remote mount on one host: an actor in a separate process."""

from __future__ import annotations

import asyncio
import bisect
import ctypes
import errno
import hashlib
import heapq
import itertools
import logging
import os
import socket
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.actor import Actor, concurrent_endpoint, endpoint
from monarch_kernel.rdma import RDMATcpFallbackWarning
from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError
from monarch_kernel.runtime.transfer.errors import RDMAError
from workspace_sync.model.errors import MountError, StoreError
from workspace_sync.model.manifest import (
    FileEntry,
    Folder,
    Manifest,
    changes,
    decode_delta,
    digest_of,
    entry_path,
    patched,
)
from workspace_sync.mounts.layout import CLIENT, PackedBlock, PackedSegment
from workspace_sync.mounts.mounting import Mount, MountedAt, namespace
from workspace_sync.mounts.protocol import (
    GREETING,
    ROOT,
    Attributes,
    Caching,
    Entered,
    FuseSession,
    InodeTable,
    Listed,
    Request,
)
from workspace_sync.mounts.source import Edition, Loan, Slabs, Way
from workspace_sync.store.store import Store

# Store the content of a remote mount on a host, and fetch missing blocks.
#
# Each block is verified piece by piece, then written once.

log = logging.getLogger(__name__)

#: The number of blocks that are fetched in parallel.
FETCHERS = 4
#: The readahead for a program that reads a file in order (bytes).
AHEAD = 16 << 20
#: A read this close behind the last one counts as in order, because the kernel reads ahead out of order (bytes).
_NEAR = 4 << 20
#: The time limit for the transfer of one block (seconds).
_TRANSFER = 60.0
#: The number of attempts to fetch a block before it counts as lost.
_ATTEMPTS = 5

Done = Callable[[list[bytes] | OSError], None]

_DEMAND, _READ_AHEAD, _PREFILL = range(3)
_ABSENT, _QUEUED, _FETCHING, _PRESENT = range(4)


class FetchError(Exception):
    """A block could not be fetched from any source."""


@dataclass(frozen=True)
class Fetched:
    """A block that was received in a buffer.

    Attributes:
        source: where it came from, for ``stored`` and ``rejected``.
        missing: the numbers of its pieces that the client could not read.
        loan: the number of its loan.
    """

    source: int
    missing: frozenset[int] = frozenset()
    loan: int = 0


@dataclass
class _Place:
    """Location of a piece."""

    file: _HostSegment
    offset: int
    block: int
    number: int


@dataclass
class _File:
    """The pieces of a file, in order, by their start offsets."""

    starts: list[int]
    places: list[_Place]
    last: int = 0  # the end of the last read


class _HostSegment:
    """A segment, its offset ``base`` in the spool, and the state of its blocks."""

    def __init__(self, segment: PackedSegment, base: int) -> None:
        self.segment = segment
        self.base = base
        self.states = bytearray(len(segment.blocks))
        self.missing: dict[int, frozenset[int]] = {}


@dataclass(order=True)
class _Job:
    urgency: int
    order: int
    file: _HostSegment = field(compare=False)
    block: int = field(compare=False)


class HostBlocks:
    """Content of files on this host. Blocks are fetched when they are first read.

    Args:
        rank: the number of this host among those of the mount.
        source: the client's actor, ``MountSource``.

    Raises:
        MountError: the store cannot be used.
    """

    def __init__(self, rank: int, source: object) -> None:
        self._spool = Spool()
        self._end = 0
        self._fetcher = _BlockFetcher(rank, source)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._jobs: list[_Job] = []
        self._order = itertools.count()
        self._segments: list[_HostSegment] = []
        self._places: dict[bytes, _Place] = {}
        self._files: dict[bytes, _File] = {}
        self._waiting: dict[tuple[int, int], list[Callable[[OSError | None], None]]] = {}
        self._closed = False
        #: The number of bytes received.
        self.received = 0
        for number in range(FETCHERS):
            threading.Thread(target=self._fetch_all, name=f"fetch-{number}", daemon=True).start()

    def add(self, segment: PackedSegment) -> None:
        """Add the next segment."""
        with self._lock:
            assert segment.number == len(self._segments)
            file = _HostSegment(segment, self._end)
            self._end += segment.size
            self._segments.append(file)
            for number, block in enumerate(segment.blocks):
                offset = block.offset
                for index, piece in enumerate(block.pieces):
                    self._places[piece.digest] = _Place(file, offset, number, index)
                    offset += piece.size

    def retry(self) -> None:
        """Fetch incomplete blocks again: an unreadable file may be readable now."""
        with self._lock:
            self._files.clear()
            for file in self._segments:
                for block in file.missing:
                    file.states[block] = _ABSENT
                file.missing.clear()

    def prefill(self, segment: PackedSegment, host: int, hosts: int) -> None:
        """Prefetch the code of a segment.

        Each host starts at a different block, so that the hosts can exchange blocks.
        """
        count = segment.ahead
        first = count * host // max(1, hosts)
        with self._lock:
            file = self._segments[segment.number]
            for number in range(count):
                self._want(file, (first + number) % count, _PREFILL)

    def size_of(self, segment: int, block: int) -> int:
        """Return the size of a block (bytes)."""
        with self._lock:
            return self._segments[segment].segment.blocks[block].size

    def lend(self, segment: int, block: int, into: memoryview) -> frozenset[int] | None:
        """Copy a block into a buffer for another host.

        Returns:
            The numbers of the pieces that are missing in it; None: this host does not have the block.
        """
        with self._lock:
            file = self._segments[segment] if segment < len(self._segments) else None
            if file is None or file.states[block] != _PRESENT:
                return None
            missing = file.missing.get(block, frozenset())
        about = file.segment.blocks[block]
        self._spool.read_into(into[: about.size], file.base + about.offset)
        return missing

    def drop_unused(self, live: Set[bytes]) -> None:
        """Free the space of blocks that contain none of these pieces; nothing may read these blocks any more."""
        with self._lock:
            for file in self._segments:
                for number, block in enumerate(file.segment.blocks):
                    if file.states[number] == _PRESENT and not any(piece.digest in live for piece in block.pieces):
                        file.states[number] = _ABSENT
                        self._spool.free(file.base + block.offset, block.size)

    def read(self, entry: FileEntry, offset: int, size: int, done: Done) -> Callable[[], None] | None:
        """Read bytes of a file; call ``done`` at once, or later from another thread.

        Returns:
            A function that cancels the wait; None if there is no wait.
        """
        with self._lock:
            file = self._file(entry)
            absent = self._absent(file, offset, size)
            self._read_ahead(entry, file, offset, size)
            if absent:
                return self._wait_for(absent, lambda error: self._finish(entry, offset, size, done, error))
        self._finish(entry, offset, size, done, None)
        return None

    def close(self) -> None:
        """Stop fetching; waiting reads fail."""
        with self._lock:
            self._closed = True
            waiting = [each for callbacks in self._waiting.values() for each in callbacks]
            self._waiting.clear()
            self._work.notify_all()
        for callback in waiting:
            callback(OSError(errno.EIO, "the mount is closed"))

    # -- reading -----------------------------------------------------------------------------------------

    def _file(self, entry: FileEntry) -> _File:
        file = self._files.get(entry.digest)
        if file is None:
            pieces = list(entry.pieces())
            file = _File([start for _, start, _ in pieces], [self._places[digest] for digest, _, _ in pieces])
            self._files[entry.digest] = file
        return file

    def _absent(self, file: _File, offset: int, size: int) -> list[tuple[_HostSegment, int]]:
        """Return the blocks of a range that are not here."""
        first = bisect.bisect_right(file.starts, offset) - 1
        last = bisect.bisect_left(file.starts, offset + size)
        needed = {(id(p.file), p.block): (p.file, p.block) for p in file.places[first:last]}
        return [(f, block) for f, block in needed.values() if f.states[block] != _PRESENT]

    def _read_ahead(self, entry: FileEntry, file: _File, offset: int, size: int) -> None:
        in_order = abs(offset - file.last) <= _NEAR
        file.last = offset + size
        if in_order and file.last < entry.size:
            for segment, block in self._absent(file, file.last, min(AHEAD, entry.size - file.last)):
                self._want(segment, block, _READ_AHEAD)

    def _wait_for(
        self, absent: list[tuple[_HostSegment, int]], then: Callable[[OSError | None], None]
    ) -> Callable[[], None]:
        """Request blocks, and call ``then`` once: when all are here, or when one cannot be fetched."""
        left = len(absent)
        lock = threading.Lock()
        over = False

        def one(error: OSError | None) -> None:
            nonlocal left, over
            with lock:
                left -= 1
                ready = not over and (error is not None or left == 0)
                over = over or ready
            if ready:
                then(error)

        def cancel() -> None:
            nonlocal over
            with lock:
                over = True

        for file, block in absent:
            self._waiting.setdefault((file.segment.number, block), []).append(one)
            self._want(file, block, _DEMAND)
        return cancel

    def _finish(self, entry: FileEntry, offset: int, size: int, done: Done, error: OSError | None) -> None:
        if error is not None:
            done(error)
            return
        with self._lock:
            file = self._file(entry)
        parts: list[bytes] = []
        index = bisect.bisect_right(file.starts, offset) - 1
        end = offset + size
        while offset < end:
            place = file.places[index]
            if place.number in place.file.missing.get(place.block, ()):
                done(OSError(errno.EIO, "the file has changed at the client since it was mounted"))
                return
            until = file.starts[index + 1] if index + 1 < len(file.starts) else entry.size
            within = place.offset + offset - file.starts[index]
            count = min(end, until) - offset
            try:
                parts.append(self._spool.read(count, place.file.base + within))
            except OSError as e:
                done(OSError(errno.EIO, str(e)))
                return
            offset += count
            index += 1
        done(parts)

    # -- fetching ----------------------------------------------------------------------------------------

    def _want(self, file: _HostSegment, block: int, urgency: int) -> None:
        state = file.states[block]
        if state == _ABSENT or (state == _QUEUED and urgency == _DEMAND):  # it may be queued with lower urgency
            file.states[block] = _QUEUED
            heapq.heappush(self._jobs, _Job(urgency, next(self._order), file, block))
            self._work.notify()

    def _fetch_all(self) -> None:
        buffer = bytearray()
        while True:
            with self._lock:
                while not self._jobs and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
                job = heapq.heappop(self._jobs)
                if job.file.states[job.block] != _QUEUED:
                    continue
                job.file.states[job.block] = _FETCHING
            block = job.file.segment.blocks[job.block]
            if len(buffer) < block.size:
                buffer = bytearray(block.size)
            error = self._fetch(job, block, memoryview(buffer)[: block.size])
            with self._lock:
                job.file.states[job.block] = _ABSENT if error else _PRESENT
                callbacks = self._waiting.pop((job.file.segment.number, job.block), [])
            for callback in callbacks:
                callback(error)

    def _fetch(self, job: _Job, block: PackedBlock, into: memoryview) -> OSError | None:
        number = job.file.segment.number
        try:
            for _ in range(3):
                fetched = self._fetcher.fetch(number, job.block, into)
                if _is_intact(block, into, fetched.missing):
                    self._spool.write(into, job.file.base + block.offset)
                    if fetched.missing:
                        job.file.missing[job.block] = fetched.missing
                    self.received += block.size
                    self._fetcher.stored(number, job.block, fetched)
                    return None
                self._fetcher.rejected(number, job.block, fetched)
            log.warning("block %d of segment %d arrived three times with wrong content", job.block, number)
        except FetchError as e:
            log.warning("block %d of segment %d cannot be fetched: %s", job.block, number, e)
        except OSError as e:
            log.warning("block %d of segment %d cannot be stored: %s", job.block, number, e)
            return e
        except Exception:
            log.exception("fetching block %d of segment %d failed", job.block, number)
        return OSError(errno.EIO, os.strerror(errno.EIO))


def _is_intact(block: PackedBlock, data: memoryview, missing: frozenset[int]) -> bool:
    offset = 0
    for number, piece in enumerate(block.pieces):
        if number not in missing and digest_of(data[offset : offset + piece.size]) != piece.digest:
            return False
        offset += piece.size
    return True


class _BlockFetcher:
    """Fetch blocks from the source that the client chooses: the client or another host."""

    def __init__(self, rank: int, source: Any) -> None:
        self._rank = rank
        self._source = source

    def fetch(self, segment: int, block: int, into: memoryview) -> Fetched:
        avoid: frozenset[int] = frozenset()
        why = ""
        for _ in range(_ATTEMPTS):
            try:
                way: Way = self._source.route.call_one(self._rank, segment, block, avoid).get(_TRANSFER)
            except (SupervisionError, ActorError, TimeoutError) as e:
                raise FetchError(f"the client does not answer: {e}") from None
            dead = False
            try:
                loan: Loan | None = way.loan or way.actor.lend.call_one(segment, block).get(_TRANSFER)
                if loan is not None:
                    loan.buffer.read_into(into, size=len(into), timeout=_TRANSFER).get(_TRANSFER)
                    if way.source != CLIENT:
                        way.actor.give_back.broadcast(loan.number)
                    return Fetched(way.source, loan.missing, loan.number)
            except (RDMAError, SupervisionError, ActorError, TimeoutError) as e:
                why, dead = str(e), way.source != CLIENT
            number = 0 if way.loan is None else way.loan.number
            self._source.failed.broadcast(self._rank, segment, block, way.source, number, dead)
            avoid |= {way.source} - {CLIENT}
        raise FetchError(why or "no host that should have the block has it")

    def stored(self, segment: int, block: int, fetched: Fetched) -> None:
        self._source.got.broadcast(self._rank, segment, block, fetched.source, fetched.loan)

    def rejected(self, segment: int, block: int, fetched: Fetched) -> None:
        self._source.failed.broadcast(self._rank, segment, block, fetched.source, fetched.loan, True)


#: ``FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE``
_PUNCH_HOLE = 3


class Spool:
    """Disk space that is freed when the process ends, however it ends. Thread-safe.

    Raises:
        MountError: the store cannot be used.
    """

    def __init__(self) -> None:
        try:
            with Store() as store, store.private_folder("mounts") as folder:
                self._file = tempfile.TemporaryFile(dir=folder.path)  # noqa: SIM115  # as long as this object
        except (StoreError, OSError) as e:
            raise MountError(f"there is no place for what a mount reads: {e}") from None
        self._fd = self._file.fileno()
        self._libc = ctypes.CDLL(None)

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes; raise OSError, for example if the disk is full."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)

    def read(self, size: int, offset: int) -> bytes:
        """Read bytes; raise OSError if the disk fails."""
        data = os.pread(self._fd, size, offset)
        if len(data) != size:
            raise OSError(f"{size} bytes were written, and {len(data)} are there")
        return data

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Read bytes into memory; raise OSError if the disk fails."""
        if os.preadv(self._fd, [memory], offset) != len(memory):
            raise OSError(f"{len(memory)} bytes were written, and fewer are there")

    def free(self, offset: int, size: int) -> None:
        """Free the space of some bytes, if the file system supports it."""
        self._libc.fallocate(self._fd, _PUNCH_HOLE, ctypes.c_longlong(offset), ctypes.c_longlong(size))


# File system of a remote mount: one manifest at a time, whose files are read from blocks.
#
# An inode is one version of a file: name, content, mode and time. After a change, the name refers to a new inode, and
# the old inode remains for processes that have it open. The kernel may therefore cache everything indefinitely, and
# pages of different versions never mix.

#: The number of cached folder listings.
_LISTINGS = 16
#: The identity of an inode: its path, and a value that distinguishes the versions of a file or link.
_Key = tuple[bytes, bytes | tuple[bytes, int, int] | None]


def _key(path: bytes, what: FileEntry | bytes | None) -> _Key:
    return path, (what.digest, what.mode, what.mtime) if isinstance(what, FileEntry) else what


def _inode(key: _Key) -> int:
    """Return the inode number that ``stat`` and listings show."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1 | 1 << 32


@dataclass(slots=True)
class _Node:
    """An inode. ``what`` is the entry of a file or the target of a link; None for a folder, whose key is its path."""

    number: int
    path: bytes
    what: FileEntry | bytes | None
    lookups: int = 0


def _key_of(node: _Node) -> _Key:
    return _key(node.path, node.what)


class ManifestTree:
    """A read-only file system with the content of a manifest.

    Args:
        manifest: the first one.
        content: provides the bytes of files.
    """

    def __init__(self, manifest: Manifest, content: HostBlocks) -> None:
        self._manifest = manifest
        self._content = content
        self._lock = threading.Lock()
        self._inodes: InodeTable[_Key, _Node] = InodeTable(_key_of, _Node(ROOT, b"", None, 1))
        # When a folder last changed (ns): Python and others cache listings while this is unchanged.
        self._opened = time.time_ns()
        self._times: dict[bytes, int] = {}
        self._listings: dict[tuple[bytes, bytes], list[Listed]] = {}

    @property
    def manifest(self) -> Manifest:
        """The manifest that the mount shows."""
        return self._manifest

    def switch(self, manifest: Manifest, session: FuseSession) -> None:
        """Switch to another manifest, and make the kernel forget entries that differ."""
        old = self._manifest
        changed = list(changes(old, manifest))
        now = time.time_ns()
        with self._lock:
            self._manifest = manifest
            stale: list[tuple[int, bytes]] = []
            folders: set[int] = set()
            for change in changed:
                for path in {change.path, change.path.rpartition(b"/")[0]}:
                    if path in manifest.folders:
                        self._times[path] = now
                    if (own := self._inodes.by_key.get((path, None))) is not None:
                        folders.add(own.number)
            # No digest covers the times of files, but they are visible.
            paths = [change.path for change in changed]
            paths += (
                node.path
                for node in self._inodes.by_key.values()
                if isinstance(node.what, FileEntry) and manifest.file(node.path) != node.what
            )
            for path in paths:
                parent, _, name = path.rpartition(b"/")
                above = self._inodes.by_key.get((parent, None))
                if above is not None and path:
                    stale.append((above.number, name))
        for number, name in dict.fromkeys(stale):
            session.invalidate_entry(number, name)
        for number in folders:
            session.invalidate_node(number)

    def live(self) -> set[bytes]:
        """Return the digests of all pieces that may still be read: of the manifest, and of open files of older ones."""
        with self._lock:
            entries = [node.what for node in self._inodes.by_number.values() if isinstance(node.what, FileEntry)]
            manifest = self._manifest
        entries += (entry for _, entry in manifest.files())
        return {digest for entry in entries for digest, _, _ in entry.pieces()}

    # -- requests ----------------------------------------------------------------------------------------

    def lookup(self, request: Request, parent: int, name: bytes) -> None:
        with self._lock:
            folder = self._folder(parent)
            found = None if folder is None else self._enter(self._inodes.by_number[parent].path, folder, name)
        request.found(found or Entered(0))

    def getattr(self, request: Request, node: int) -> None:
        with self._lock:
            about = self._about(self._inodes.by_number[node])
        if about is None:
            request.fail(errno.ESTALE)
        else:
            request.attributes(about)

    def readlink(self, request: Request, node: int) -> None:
        target = self._inodes.by_number[node].what
        assert isinstance(target, bytes)
        request.data(target)

    def open(self, request: Request, node: int) -> None:
        request.fail(errno.ENOSYS)  # the kernel then opens files without requests

    def release(self, handle: int) -> None:
        pass

    def read(self, request: Request, node: int, handle: int, offset: int, size: int) -> None:
        entry = self._inodes.by_number[node].what
        assert isinstance(entry, FileEntry)
        size = min(size, entry.size - offset)
        if size <= 0:
            request.data()
            return

        def done(result: list[bytes] | OSError) -> None:
            if isinstance(result, OSError):
                request.fail(result.errno or errno.EIO)
            else:
                request.data(*result)

        request.later()
        request.cancelled = self._content.read(entry, offset, size, done)

    def opendir(self, request: Request, node: int) -> None:
        request.fail(errno.ENOSYS)

    def releasedir(self, handle: int) -> None:
        pass

    def readdir(self, request: Request, node: int, handle: int, offset: int, size: int, plus: bool) -> None:
        with self._lock:
            here = self._inodes.by_number[node]
            folder = self._folder(node)
            if folder is None:
                request.fail(errno.ENOENT)
                return
            entries = self._entries(here.path, folder)
            if not plus:
                request.entries(entries, offset, size)
                return

            def find(listed: Listed) -> Entered:
                found = self._enter(here.path, folder, listed.name)
                assert found is not None
                return found

            request.entries_plus(entries, offset, size, find)

    def statfs(self, request: Request) -> None:
        files, size = self._manifest.count()
        request.space(size, 0, files)

    def forget(self, node: int, count: int) -> None:
        with self._lock:
            self._inodes.forget(node, count)

    # -- inodes ------------------------------------------------------------------------------------------

    def _entries(self, path: bytes, folder: Folder) -> list[Listed]:
        """Return the entries of a folder; cache them, because the kernel reads a large folder in many parts."""
        key = path, folder.digest
        entries = self._listings.get(key)
        if entries is None:
            entries = self._listings[key] = _listing(path, folder)
            while len(self._listings) > _LISTINGS:
                del self._listings[next(iter(self._listings))]
        return entries

    def _folder(self, number: int) -> Folder | None:
        node = self._inodes.by_number[number]
        return self._manifest.folders.get(node.path) if node.what is None else None

    def _enter(self, parent: bytes, folder: Folder, name: bytes) -> Entered | None:
        """Look a name up in a folder, and count the lookup."""
        path = entry_path(parent, name)
        what: FileEntry | bytes | None
        if name in folder.files:
            what = folder.files[name]
        elif name in folder.links:
            what = folder.links[name]
        elif name in folder.folders:
            what = None
        else:
            return None
        node = self._inodes.enter(_key(path, what), lambda number: _Node(number, path, what))
        return Entered(node.number, self._about(node))

    def _about(self, node: _Node) -> Attributes | None:
        what = node.what
        inode = _inode(_key_of(node))
        if isinstance(what, FileEntry):
            return Attributes(inode, stat.S_IFREG | what.mode, what.size, what.mtime)
        if isinstance(what, bytes):
            return Attributes(inode, stat.S_IFLNK | 0o777, len(what), self._opened)
        folder = self._manifest.folders.get(node.path)
        if folder is None:
            return None
        changed = self._times.get(node.path, self._opened)
        return Attributes(inode, stat.S_IFDIR | folder.mode, 4096, changed, 2 + len(folder.folders))


def _listing(path: bytes, folder: Folder) -> list[Listed]:
    """Build the sorted entries of a folder."""
    prefix = path + b"/" if path else b""

    def listed(names: Mapping[bytes, FileEntry | bytes | None], kind: int) -> Iterator[Listed]:
        for name, what in names.items():
            yield Listed(name, _inode(_key(prefix + name, what)), kind)

    entries = [*listed(folder.files, stat.S_IFREG), *listed(folder.links, stat.S_IFLNK)]
    entries += listed(dict.fromkeys(folder.folders), stat.S_IFDIR)
    entries.sort(key=lambda entry: entry.name)
    here = _inode((path, None))
    above = _inode((path.rpartition(b"/")[0], None))
    return [Listed(b".", here, stat.S_IFDIR), Listed(b"..", above, stat.S_IFDIR), *entries]


class HostMount(Actor):
    """Server of a folder of the client at a mount point of this host.

    Args:
        rank: the number of this host among those of the mount.
        hosts: their number.
        source: the client's actor.
    """

    __tool__ = True

    def __init__(self, rank: int, hosts: int, source: object) -> None:
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        self._rank = rank
        self._hosts = hosts
        self._source = source
        self._slabs = Slabs()
        self._mount: Mount | None = None
        self._session: FuseSession | None = None
        self._tree: ManifestTree | None = None
        self._blocks: HostBlocks | None = None
        self._next: tuple[Manifest, PackedSegment] | None = None

    @endpoint
    async def open(self, path: str, edition: Edition, client: tuple[str, str], folder: tuple[int, int]) -> MountedAt:
        """Mount.

        Args:
            path: the mount point.
            edition: the whole content.
            client: the ``namespace()`` of the caller.
            folder: device and inode of the folder at the client.

        Raises:
            MountError: it cannot be mounted here.
        """
        return await asyncio.to_thread(self._open, path, edition, client, folder)

    @endpoint
    async def prepare(self, edition: Edition) -> None:
        """Receive the content for the next ``switch``.

        Raises:
            MountError: the mount has ended.
        """
        await asyncio.to_thread(self._prepare, edition)

    @endpoint
    async def switch(self) -> None:
        """Switch to the prepared content."""
        await asyncio.to_thread(self._switch)

    @concurrent_endpoint
    async def lend(self, segment: int, block: int) -> Loan | None:
        """Lend a block to another host, which returns it with ``give_back``; None: the block is not here."""
        if self._blocks is None:
            return None
        slab = await self._slabs.get(self._blocks.size_of(segment, block))
        try:
            missing = await asyncio.to_thread(self._blocks.lend, segment, block, slab.memory)
        except BaseException:
            self._slabs.free(slab)
            raise
        if missing is None:
            self._slabs.free(slab)
            return None
        return Loan(slab.buffer, missing, self._slabs.lend(slab))

    @endpoint
    async def give_back(self, loan: int) -> None:
        """Take back a lent block after the other host has read it."""
        self._slabs.give_back(loan)

    @endpoint
    async def received(self) -> int:
        """Return the number of bytes received by this host."""
        return 0 if self._blocks is None else self._blocks.received

    @endpoint
    async def close(self) -> None:
        """Unmount, even while programs use the mount.

        Raises:
            MountError: it could not be unmounted.
        """
        await asyncio.to_thread(self._unmount)

    async def __cleanup__(self, _error: BaseException | None) -> None:
        await asyncio.to_thread(self._unmount)

    def _open(self, path: str, edition: Edition, client: tuple[str, str], folder: tuple[int, int]) -> MountedAt:
        here = namespace()
        mount = self._mount = Mount(path, "remotemount", folder if here[0] == client[0] else None)
        # This process must never access its own mount.
        sys.path[:] = [entry for entry in sys.path if entry and not _is_below(entry, mount.path)]
        near = here == client
        try:
            self._blocks = HostBlocks(self._rank, self._source)
            self._blocks.add(edition.segment)
            self._tree = ManifestTree(patched(None, decode_delta(edition.change)), self._blocks)
            self._session = FuseSession(mount.device, self._tree, Caching(names=None, contents=True))
            if not near:
                mount.guard()
            if not self._session.wait_ready(GREETING):
                raise MountError(f"the kernel of {socket.gethostname()} did not accept the mount at {mount.path}")
        except BaseException:
            self._unmount()
            raise
        self._blocks.prefill(edition.segment, self._rank, self._hosts)
        return MountedAt(os.getpid(), mount.path, mount.source, near)

    def _prepare(self, edition: Edition) -> None:
        if self._session is None or self._session.over or self._tree is None or self._blocks is None:
            raise MountError("the mount has ended: close it, and open it again")
        self._next = patched(self._tree.manifest, decode_delta(edition.change)), edition.segment
        self._blocks.add(edition.segment)
        self._blocks.retry()

    def _switch(self) -> None:
        assert self._tree is not None and self._session is not None
        assert self._blocks is not None and self._next is not None
        (manifest, segment), self._next = self._next, None
        if manifest.digest == self._tree.manifest.digest:
            return
        self._tree.switch(manifest, self._session)
        self._blocks.prefill(segment, self._rank, self._hosts)
        blocks, tree = self._blocks, self._tree
        threading.Thread(target=lambda: blocks.drop_unused(tree.live()), name="mount-space", daemon=True).start()

    def _unmount(self) -> None:
        mount, self._mount = self._mount, None
        if mount is not None:
            mount.close()
        if self._blocks is not None:
            self._blocks.close()


def _is_below(path: str, folder: str) -> bool:
    path = os.path.abspath(path)
    return path == folder or path.startswith(folder.rstrip("/") + "/")
