"""Hash files: read each once, in pieces, on several threads, and offer the content while it is in memory.

Files are read and not mapped: one that is truncated while it is mapped would end the process (SIGBUS).
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from blake3 import blake3

from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import DIGEST_SIZE, MODE_BITS, EarlyFile, digest_of, thread_buffer
from workspace_sync.scanning.announcement import Announcement
from workspace_sync.scanning.chunking import ANCHOR, CHUNK, Cuts, again, even

#: The most content in one memory (bytes), and the most bytes of paths and digests that describe it.
CONTENT = 7 << 19
ABOUT = 1 << 19
#: What a row takes beside its path and its digests, at most (bytes).
ROW = 64


@dataclass(frozen=True)
class ScanPlan:
    """Content that a scan is about to read.

    Attributes:
        roots: the folders of the client by their places in the tree.
        files: how many.
        bytes: their sizes, as listed.
        announcement: what a person should know before it is sent; None: it is not much.
    """

    roots: dict[bytes, bytes]
    files: int
    bytes: int
    announcement: Announcement | None


class ContentTaker(Protocol):
    """Takes content during a scan. Called by the threads of the scan."""

    def planned(self, plan: ScanPlan) -> None:
        """Begin: the scan has planned its reads."""
        ...

    def take(self) -> memoryview | None:
        """Memory for ``CONTENT`` and its description, perhaps after a wait; None: nothing is wanted any more."""
        ...

    def give(self, memory: memoryview, used: int, files: list[EarlyFile]) -> None:
        """Memory of ``take`` is filled.

        Args:
            used: so many bytes of it are content.
            files: what that is, in its order; without any, the memory goes back.
        """
        ...


#: Threads that read and hash; more of them only wait for the disk.
THREADS = min(8, os.cpu_count() or 1)
#: Small files that one task reads, so that handing them out costs little.
_BATCH = 64
#: How often a file that changes while it is read is read again.
_TRIES = 4
#: How much of a large file is read at once (bytes); at least a chunk.
_BLOCK = 8 * CHUNK


@dataclass(slots=True)
class Hashed:
    """A file as it was read.

    Attributes:
        size: bytes.
        mtime: when it was changed (ns since the epoch).
        ctime: when it, or what ``lstat`` says of it, was changed (ns since the epoch).
        node: its mode, inode and device.
        digest: of its content.
        chunks: the digests of its chunks, if there are several.
        cuts: how it was cut, if it has several chunks.
    """

    # No stat_result: it takes three times the memory, and there is one for each file of a first scan.
    size: int
    mtime: int
    ctime: int
    node: tuple[int, ...]
    digest: bytes
    chunks: tuple[bytes, ...] = ()
    cuts: Cuts | None = None


#: What becomes of a file that is hashed; "unsteady": it changes whenever it is read; None: it is gone.
Outcome = Hashed | OSError | Literal["unsteady"] | None


@dataclass(frozen=True, slots=True)
class FileToRead:
    """A file that is to be hashed.

    Attributes:
        path: where it is.
        size: about how large it is (bytes).
        known: how it was cut before.
        place: its path in the tree.
    """

    path: bytes
    size: int
    known: Cuts | None
    place: bytes


def hash_files(
    paths: list[FileToRead],
    report: Callable[[int], None],
    cancelled: Callable[[], bool] | None = None,
    taker: ContentTaker | None = None,
) -> list[Outcome]:
    """Hash files.

    Args:
        paths: the files.
        report: is called with bytes that were read since the last call, on any thread.
        cancelled: whether to stop.
        taker: gets the content as it is read. What is read again as it has changed meanwhile, it does not get.

    Returns:
        What became of each, in the same order.

    Raises:
        ScanError: it was cancelled.
    """
    outcomes: list[Outcome] = [None] * len(paths)
    small = [i for i, file in enumerate(paths) if file.size <= CHUNK]
    large = sorted((i for i, file in enumerate(paths) if file.size > CHUNK), key=lambda i: -paths[i].size)
    run = _Run(report)

    def some(numbers: list[int]) -> None:
        if run.stopped.is_set():
            return
        if cancelled is not None and cancelled():
            run.stopped.set()
        read = 0
        with _Filling(taker) as filling:
            for i in numbers:
                outcomes[i] = outcome = _attempt(paths[i], run, filling)
                if isinstance(outcome, Hashed) and not outcome.chunks:
                    read += outcome.size
        report(read)

    batches = _batches(paths, small, taker is not None)
    if len(batches) + len(large) <= 1 and not large:
        for batch in batches:
            some(batch)
    else:
        with ThreadPoolExecutor(THREADS, "hash") as pool:
            tasks: list[Future[None]] = []
            if len(large) < THREADS:
                tasks += [pool.submit(some, batch) for batch in batches]
                with ThreadPoolExecutor(THREADS, "chunks") as helpers:
                    for i in large:
                        with _Filling(taker) as filling:
                            outcomes[i] = _attempt(paths[i], replace(run, helpers=helpers), filling)
                        if cancelled is not None and cancelled():
                            run.stopped.set()
            else:
                tasks += [pool.submit(some, [i]) for i in large]
                tasks += [pool.submit(some, batch) for batch in batches]
            for task in tasks:
                task.result()
    if run.stopped.is_set():
        raise ScanError("the scan was cancelled")
    return outcomes


def _batches(paths: list[FileToRead], small: list[int], streams: bool) -> list[list[int]]:
    """Small files that one thread reads together; if content is taken, as many as one memory has room for."""
    if not streams:
        return [small[i : i + _BATCH] for i in range(0, len(small), _BATCH)]
    batches: list[list[int]] = []
    size = about = 0
    for i in small:
        row = len(paths[i].place) + DIGEST_SIZE + ROW
        if not batches or size + paths[i].size > CONTENT or about + row > ABOUT:
            batches.append([])
            size = about = 0
        batches[-1].append(i)
        size += paths[i].size
        about += row
    return batches


@dataclass(frozen=True, slots=True)
class _Run:
    """One call of ``hash_files``.

    Attributes:
        report: see ``hash_files``.
        stopped: set when it was cancelled.
        helpers: threads that hash the chunks of a large file.
    """

    report: Callable[[int], None]
    stopped: threading.Event = field(default_factory=threading.Event)
    helpers: ThreadPoolExecutor | None = None


class _Filling:
    """The memory of a ``ContentTaker`` that files are read into, one behind the other; it is given at the end."""

    def __init__(self, taker: ContentTaker | None) -> None:
        self._taker = taker
        self._memory: memoryview | None = None
        self._used = 0
        self._files: list[EarlyFile] = []

    def __enter__(self) -> _Filling:
        return self

    def __exit__(self, *_: object) -> None:
        self.give()

    @property
    def active(self) -> bool:
        """Whether content is wanted."""
        return self._taker is not None

    def room(self, size: int) -> memoryview | None:
        """Memory for so many bytes; None: there is none, or nothing is wanted."""
        if self._memory is None:
            if self._taker is None:
                return None
            self._memory = self._taker.take()
            if self._memory is None:
                self._taker = None
                return None
        end = self._used + size
        return self._memory[self._used : end] if end <= CONTENT else None

    def fill(self, file: EarlyFile, size: int) -> None:
        """Content has been read into the memory of ``room``."""
        self._files.append(file)
        self._used += size

    def give(self) -> None:
        """Give the content so far; what follows goes into other memory."""
        memory, self._memory = self._memory, None
        if memory is not None and self._taker is not None:
            self._taker.give(memory, self._used, self._files)
        self._used, self._files = 0, []


#: Takes nothing.
_NOTHING = _Filling(None)


def _attempt(file: FileToRead, run: _Run, filling: _Filling) -> Outcome:
    for _ in range(_TRIES):
        if run.stopped.is_set():
            return None
        try:
            found = _hash_once(file, run, filling)
        except FileNotFoundError:
            return None
        except OSError as e:
            return e
        if found is not None:
            return found
        filling = _NOTHING  # some of its pieces may be on their way already, and each is sent ahead once
    return "unsteady"


def _hash_once(file: FileToRead, run: _Run, filling: _Filling) -> Hashed | None:
    """Hash a file; None if it changed meanwhile."""
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    room: memoryview | None = None
    try:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            return None
        size = before.st_size
        if size <= CHUNK:
            room = filling.room(size) if size else None
            data = thread_buffer()[:size] if room is None else room
            if not read_fully(fd, data, 0):
                return None
            found = Hashed(*_hint(before), digest_of(data))
        else:
            if file.known is None:
                sizes = even(size)
            else:
                sizes = again(file.known, size, lambda offset, length: os.pread(fd, length, offset))
            if filling.active and file.known is None:
                large = _hash_and_give(fd, file.place, before, sizes, run, filling)
            else:
                large = _hash_large(fd, sizes, run)
            if large is None:
                return None
            found = Hashed(*_hint(before), *large)
        after = os.fstat(fd)
    finally:
        os.close(fd)
    if _hint(after) != _hint(before):
        return None
    if room is not None:
        mode = before.st_mode & MODE_BITS
        filling.fill(EarlyFile(file.place, size, mode, before.st_mtime_ns, 0, (found.digest,), (size,)), size)
    return found


def _hint(about: os.stat_result) -> tuple[int, int, int, tuple[int, ...]]:
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about[:3]


def _hash_large(fd: int, sizes: tuple[int, ...], run: _Run) -> tuple[bytes, tuple[bytes, ...], Cuts] | None:
    whole = blake3()
    digests: list[bytes] = []
    anchors: list[bytes] = []
    pending: list[Future[list[bytes]] | None] = [None, None]
    blocks = [bytearray(_BLOCK) for _ in pending]
    offset = turn = 0
    for pieces in _blocks(sizes, _BLOCK):
        if run.stopped.is_set():
            return None
        # One block is read while the chunks of the other are hashed.
        if (task := pending[turn]) is not None:
            digests += task.result()
            pending[turn] = None
        view = memoryview(blocks[turn])[: sum(pieces)]
        if not read_fully(fd, view, offset):
            return None
        if run.helpers is None:
            digests += _chunk_digests(view, pieces)
        else:
            pending[turn] = run.helpers.submit(_chunk_digests, view, pieces)
        whole.update(view)
        anchors += _anchors(view, pieces)
        offset += len(view)
        run.report(len(view))
        turn = 1 - turn
    for task in (pending[turn], pending[1 - turn]):
        if task is not None:
            digests += task.result()
    return whole.digest(), tuple(digests), Cuts(sizes, b"".join(anchors))


def _hash_and_give(
    fd: int, place: bytes, about: os.stat_result, sizes: tuple[int, ...], run: _Run, filling: _Filling
) -> tuple[bytes, tuple[bytes, ...], Cuts] | None:
    """Hash a large file, and give each piece as soon as its digest is known."""
    whole = blake3()
    digests: list[bytes] = []
    anchors: list[bytes] = []
    offset = 0
    own = memoryview(b"")
    for pieces in _blocks(sizes, CONTENT):
        if run.stopped.is_set():
            return None
        length = sum(pieces)
        filling.give()
        room = filling.room(length)
        if room is None and not own:
            own = memoryview(bytearray(CONTENT))
        view = own[:length] if room is None else room
        if not read_fully(fd, view, offset):
            return None
        # No second block is read meanwhile: each waits for memory, and would hold what others wait for.
        task = run.helpers.submit(_chunk_digests, view, pieces) if run.helpers is not None else None
        whole.update(view)
        found = _chunk_digests(view, pieces) if task is None else task.result()
        anchors += _anchors(view, pieces)
        digests += found
        if room is not None:
            mode = about.st_mode & MODE_BITS
            given = EarlyFile(place, about.st_size, mode, about.st_mtime_ns, offset, tuple(found), tuple(pieces))
            filling.fill(given, length)
        offset += length
        run.report(length)
    return whole.digest(), tuple(digests), Cuts(sizes, b"".join(anchors))


def _anchors(view: memoryview, sizes: list[int]) -> Iterator[bytes]:
    """The first bytes of each chunk."""
    start = 0
    for size in sizes:
        yield bytes(view[start : start + min(size, ANCHOR)]).ljust(ANCHOR, b"\0")
        start += size


def _blocks(sizes: tuple[int, ...], most: int) -> Iterator[list[int]]:
    """The sizes of chunks that are read at once, together at most ``most`` bytes."""
    pieces: list[int] = []
    length = 0
    for size in sizes:
        if length + size > most:
            yield pieces
            pieces, length = [], 0
        pieces.append(size)
        length += size
    yield pieces


def _chunk_digests(view: memoryview, sizes: list[int]) -> list[bytes]:
    digests: list[bytes] = []
    start = 0
    for size in sizes:
        digests.append(digest_of(view[start : start + size]))
        start += size
    return digests


def read_at(path: bytes, offset: int, into: memoryview) -> bool:
    """Fill a buffer from the file of this path; False if it cannot be read, or ends before."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return read_fully(fd, into, offset)
    except OSError:
        return False
    finally:
        os.close(fd)


def read_fully(fd: int, into: memoryview, offset: int) -> bool:
    """Fill a buffer from a file; False if the file ends before."""
    while into:
        got = os.preadv(fd, [into], offset)
        if not got:
            return False
        into = into[got:]
        offset += got
    return True
