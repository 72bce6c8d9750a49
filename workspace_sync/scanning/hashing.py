"""Hash files: read each once, in pieces, on several threads, and offer the content while it is in memory.

Files are read and not mapped: truncating a mapped file would end the process (SIGBUS).
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from blake3 import blake3

from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import DIGEST_SIZE, MODE_BITS, EarlyFile, digest_of, thread_buffer
from workspace_sync.scanning.index import Announcement

# Cut large files into chunks.
#
# A new file is cut into chunks of equal size. When a file has changed, its previous cuts are found again by the bytes
# that followed them. An insertion or a deletion thus moves cuts, and leaves all other chunks unchanged. This sends as
# little as content-defined cuts (FastCDC), at the speed of reading, but cannot find pieces that this client has not
# seen before. ``python -m bench.chunking`` compares both; see docs/sync.md.

#: The size of a chunk (bytes). A file that is not larger is a single piece.
CHUNK = 1 << 20
#: The number of bytes after a cut that are remembered.
ANCHOR = 32
#: The distance beyond the end of a chunk within which the next cut is searched (bytes).
_BEYOND = CHUNK // 4
#: After this many chunks without a cut that was found again, only one in this many is searched.
_PATIENCE = 64
_SELDOM = 16
#: The number of following chunks that are searched if the first one is not found.
_FARTHER = 64


class Cuts(NamedTuple):
    """The chunks of a file.

    Attributes:
        sizes: of its chunks (bytes).
        anchors: the first ``ANCHOR`` bytes of each chunk, concatenated; the last is padded with zeros.
    """

    sizes: tuple[int, ...]
    anchors: bytes

    def anchor(self, number: int) -> bytes:
        """Return the remembered bytes at the start of a chunk."""
        return self.anchors[number * ANCHOR : (number + 1) * ANCHOR]


def even(size: int) -> tuple[int, ...]:
    """Compute the sizes of the chunks of a file that was not seen before."""
    last = size % CHUNK
    return (CHUNK,) * (size // CHUNK) + ((last,) if last else ())


def again(known: Cuts, size: int, read: Callable[[int, int], bytes]) -> tuple[int, ...]:
    """Compute the sizes of the chunks of a file that was cut before.

    Args:
        known: the previous cuts.
        size: its size now (bytes).
        read: returns the bytes at (offset, size); fewer at the end of the file.
    """
    if size == sum(known.sizes):
        return known.sizes  # most files of unchanged size were changed in place, and keep their cuts
    starts: list[int] = []
    position = number = 0  # the presumed start of this chunk
    found = 0
    misses = 0
    last = len(known.sizes) - 1
    while position < size and number <= last:
        if read(position, ANCHOR) == known.anchor(number):
            found += 1
            misses = 0
        else:
            misses += 1
            searched = misses <= _PATIENCE or misses % _SELDOM == 0
            hit = _search(known, starts, position, number, misses, read) if searched else None
            if hit is not None:
                if hit[1] > position:
                    starts.append(position)  # inserted data
                number, position = hit
                continue
        starts.append(position)
        # Everything after the start of the last chunk is cut anew, so that a growing file has no short chunks in it.
        position = position + known.sizes[number] if number < last else size
        number += 1
    if position < size:
        starts.append(position)
    sizes = _sizes(starts, size)
    # Many small pieces are not worth keeping, and neither are cuts of different content.
    return sizes if found and len(sizes) <= 2 * (size // CHUNK) + 16 else even(size)


def _search(
    known: Cuts, starts: list[int], position: int, number: int, misses: int, read: Callable[[int, int], bytes]
) -> tuple[int, int] | None:
    """Find the first known chunk that starts near a position; return (number, position)."""
    low = starts[-1] + 1 if starts else 0  # after a deletion it starts earlier
    window = read(low, position - low + CHUNK + _BEYOND)
    # A replacement usually keeps the length; after an insertion the next chunk follows, and after a deletion a later
    # one.
    numbers = range(number, number + _FARTHER) if misses <= 2 else (number - misses + 1, number, number + 1)
    best: tuple[int, int] | None = None
    for each in numbers:
        if best is not None and each > number + 1:
            break
        anchor = known.anchor(each)
        if len(anchor) < ANCHOR or len(set(anchor)) < ANCHOR // 4:
            continue  # such bytes occur everywhere
        at = window.find(anchor) if best is None else window.find(anchor, 0, best[1])
        if at >= 0:
            best = each, at
    return None if best is None else (best[0], low + best[1])


def _sizes(starts: list[int], size: int) -> tuple[int, ...]:
    """Return the sizes of the pieces between some positions, none larger than a chunk."""
    sizes: list[int] = []
    for start, end in zip(starts, [*starts[1:], size], strict=True):
        sizes += even(min(end, size) - start)
    return tuple(sizes)


#: The maximum of content in one buffer (bytes), and of the paths and digests that describe it (bytes).
CONTENT = 7 << 19
ABOUT = 1 << 19
#: The maximum overhead of a row in addition to its path and digests (bytes).
ROW = 64


@dataclass(frozen=True)
class ScanPlan:
    """Content that a scan will read.

    Attributes:
        roots: the folders of the client by their places in the tree.
        files: the number of files.
        bytes: their total size, as listed.
        announcement: a description for the user before the content is sent; None: there is little content.
    """

    roots: dict[bytes, bytes]
    files: int
    bytes: int
    announcement: Announcement | None


class ContentTaker(Protocol):
    """Receiver of content during a scan. The threads of the scan call it."""

    def planned(self, plan: ScanPlan) -> None:
        """Called first: the scan has planned its reads."""
        ...

    def take(self) -> memoryview | None:
        """Return memory for ``CONTENT`` and its description, perhaps after a wait; None: no more content is wanted."""
        ...

    def give(self, memory: memoryview, used: int, files: list[EarlyFile]) -> None:
        """Receive memory of ``take`` that is filled.

        Args:
            used: the number of content bytes in it.
            files: the description of the content, in order; empty: the memory is returned unused.
        """
        ...


#: The number of threads that read and hash; more would only wait for the disk.
THREADS = min(8, os.cpu_count() or 1)
#: The number of small files that one task reads, which limits the overhead of scheduling.
_BATCH = 64
#: The number of times that a file is read again because it changes while it is read.
_TRIES = 4
#: The block size for reading a large file (bytes); at least a chunk.
_BLOCK = 8 * CHUNK


@dataclass(slots=True)
class Hashed:
    """A file as it was read.

    Attributes:
        size: bytes.
        mtime: its modification time (ns since the epoch).
        ctime: the time when its content or inode was changed (ns since the epoch).
        node: its mode, inode and device.
        digest: of its content.
        chunks: the digests of its chunks, if there are several.
        cuts: its cuts, if it has several chunks.
    """

    # No stat_result: it takes three times the memory, and a first scan keeps one for each file.
    size: int
    mtime: int
    ctime: int
    node: tuple[int, ...]
    digest: bytes
    chunks: tuple[bytes, ...] = ()
    cuts: Cuts | None = None


#: Result for a file; "unsteady": it changes whenever it is read; None: it no longer exists.
Outcome = Hashed | OSError | Literal["unsteady"] | None


@dataclass(frozen=True, slots=True)
class FileToRead:
    """A file to hash.

    Attributes:
        path: its path at the client.
        size: its approximate size (bytes).
        known: its previous cuts.
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
        report: called with the number of bytes read since the last call, on any thread.
        cancelled: returns whether to stop.
        taker: receives the content as it is read, except content that is read again after a change.

    Returns:
        The result for each file, in the same order.

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
    """Group small files that one thread reads together; if content is taken, as many as fit into one buffer."""
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
        stopped: set on cancellation.
        helpers: threads that hash the chunks of large files.
    """

    report: Callable[[int], None]
    stopped: threading.Event = field(default_factory=threading.Event)
    helpers: ThreadPoolExecutor | None = None


class _Filling:
    """Buffer of a ``ContentTaker`` that is filled with consecutive files, and given back at the end."""

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
        """Return memory for this many bytes; None: there is none, or no content is wanted."""
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
        """Record content that was read into the memory of ``room``."""
        self._files.append(file)
        self._used += size

    def give(self) -> None:
        """Hand over the content so far; further content goes into another buffer."""
        memory, self._memory = self._memory, None
        if memory is not None and self._taker is not None:
            self._taker.give(memory, self._used, self._files)
        self._used, self._files = 0, []


#: A filling that takes no content.
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
        filling = _NOTHING  # some of its pieces may already be sent, and each is sent ahead only once
    return "unsteady"


def _hash_once(file: FileToRead, run: _Run, filling: _Filling) -> Hashed | None:
    """Hash a file; return None if it changed meanwhile."""
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
    """Hash a large file, and hand over each piece as soon as its digest is known."""
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
    """Iterate over the first bytes of each chunk."""
    start = 0
    for size in sizes:
        yield bytes(view[start : start + min(size, ANCHOR)]).ljust(ANCHOR, b"\0")
        start += size


def _blocks(sizes: tuple[int, ...], most: int) -> Iterator[list[int]]:
    """Group the sizes of chunks into blocks of at most ``most`` bytes that are read at once."""
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
    """Fill a buffer from the file at a path; return False if it cannot be read or is too short."""
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
    """Fill a buffer from a file; return False if the file is too short."""
    while into:
        got = os.preadv(fd, [into], offset)
        if not got:
            return False
        into = into[got:]
        offset += got
    return True
