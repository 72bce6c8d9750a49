"""Files as digests: read once, in pieces, on several threads.

Files are read and not mapped: one that is truncated while it is mapped would end the process (SIGBUS).
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import digest_of
from workspace_sync.scanning.chunking import ANCHOR, CHUNK, Cuts, again, even

#: Threads that read and hash; more of them only wait for the disk.
THREADS = min(8, os.cpu_count() or 1)
#: Small files that one task reads, so that handing them out costs little.
_BATCH = 64
#: How often a file that changes while it is read is read again.
_TRIES = 4
#: How much of a large file is read at once (bytes); at least a chunk.
_BLOCK = 8 * CHUNK

_local = threading.local()


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


def hash_files(
    paths: list[tuple[bytes, int, Cuts | None]],
    report: Callable[[int], None],
    cancelled: Callable[[], bool] | None = None,
) -> list[Outcome]:
    """Hash files.

    Args:
        paths: where they are, about how large they are (bytes), and how they were cut before.
        report: is called with bytes that were read since the last call, on any thread.
        cancelled: whether to stop.

    Returns:
        What became of each, in the same order.

    Raises:
        ScanError: it was cancelled.
    """
    outcomes: list[Outcome] = [None] * len(paths)
    small = [i for i, (_, size, _) in enumerate(paths) if size <= CHUNK]
    large = sorted((i for i, (_, size, _) in enumerate(paths) if size > CHUNK), key=lambda i: -paths[i][1])
    stopped = threading.Event()

    def some(numbers: list[int]) -> None:
        if stopped.is_set():
            return
        if cancelled is not None and cancelled():
            stopped.set()
        read = 0
        for i in numbers:
            outcomes[i] = outcome = _attempt(paths[i][0], paths[i][2], report, stopped, None)
            if isinstance(outcome, Hashed) and not outcome.chunks:
                read += outcome.size
        report(read)

    batches = [small[i : i + _BATCH] for i in range(0, len(small), _BATCH)]
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
                        outcomes[i] = _attempt(paths[i][0], paths[i][2], report, stopped, helpers)
                        if cancelled is not None and cancelled():
                            stopped.set()
            else:
                tasks += [pool.submit(some, [i]) for i in large]
                tasks += [pool.submit(some, batch) for batch in batches]
            for task in tasks:
                task.result()
    if stopped.is_set():
        raise ScanError("the scan was cancelled")
    return outcomes


def _attempt(
    path: bytes,
    known: Cuts | None,
    report: Callable[[int], None],
    stopped: threading.Event,
    helpers: ThreadPoolExecutor | None,
) -> Outcome:
    for _ in range(_TRIES):
        if stopped.is_set():
            return None
        try:
            found = _hash_once(path, known, report, stopped, helpers)
        except FileNotFoundError:
            return None
        except OSError as e:
            return e
        if found is not None:
            return found
    return "unsteady"


def _hash_once(
    path: bytes,
    known: Cuts | None,
    report: Callable[[int], None],
    stopped: threading.Event,
    helpers: ThreadPoolExecutor | None,
) -> Hashed | None:
    """Hash a file; None if it changed meanwhile."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            return None
        size = before.st_size
        if size <= CHUNK:
            data = _buffer()[:size]
            if not read_fully(fd, data, 0):
                return None
            found = Hashed(*_hint(before), digest_of(data))
        else:
            if known is None:
                sizes = even(size)
            else:
                sizes = again(known, size, lambda offset, length: os.pread(fd, length, offset))
            large = _hash_large(fd, sizes, report, stopped, helpers)
            if large is None:
                return None
            found = Hashed(*_hint(before), *large)
        after = os.fstat(fd)
    finally:
        os.close(fd)
    return found if _hint(after) == _hint(before) else None


def _buffer() -> memoryview:
    """Memory for a small file, which this thread uses again and again.

    Fresh memory of this size comes from the system, which clears it page by page; that takes longer than the reading.
    """
    try:
        return _local.buffer
    except AttributeError:
        buffer = _local.buffer = memoryview(bytearray(CHUNK))
        return buffer


def _hint(about: os.stat_result) -> tuple[int, int, int, tuple[int, ...]]:
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about[:3]


def _hash_large(
    fd: int,
    sizes: tuple[int, ...],
    report: Callable[[int], None],
    stopped: threading.Event,
    helpers: ThreadPoolExecutor | None,
) -> tuple[bytes, tuple[bytes, ...], Cuts] | None:
    whole = blake3()
    digests: list[bytes] = []
    anchors: list[bytes] = []
    pending: list[Future[list[bytes]] | None] = [None, None]
    blocks = [bytearray(_BLOCK) for _ in pending]
    offset = turn = 0
    for pieces in _blocks(sizes):
        if stopped.is_set():
            return None
        # One block is read while the chunks of the other are hashed.
        if (task := pending[turn]) is not None:
            digests += task.result()
            pending[turn] = None
        view = memoryview(blocks[turn])[: sum(pieces)]
        if not read_fully(fd, view, offset):
            return None
        if helpers is None:
            digests += _chunk_digests(view, pieces)
        else:
            pending[turn] = helpers.submit(_chunk_digests, view, pieces)
        whole.update(view)
        start = 0
        for size in pieces:
            anchors.append(bytes(view[start : start + min(size, ANCHOR)]).ljust(ANCHOR, b"\0"))
            start += size
        offset += len(view)
        report(len(view))
        turn = 1 - turn
    for task in (pending[turn], pending[1 - turn]):
        if task is not None:
            digests += task.result()
    return whole.digest(), tuple(digests), Cuts(sizes, b"".join(anchors))


def _blocks(sizes: tuple[int, ...]) -> Iterator[list[int]]:
    """The sizes of chunks that are read at once."""
    pieces: list[int] = []
    length = 0
    for size in sizes:
        if length + size > _BLOCK:
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


def read_fully(fd: int, into: memoryview, offset: int) -> bool:
    """Fill a buffer from a file; False if the file ends before."""
    while into:
        got = os.preadv(fd, [into], offset)
        if not got:
            return False
        into = into[got:]
        offset += got
    return True
