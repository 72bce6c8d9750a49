"""Large buffers between processes of one host: shared-memory segments that the receiver maps.

The sender copies a message's out-of-band buffers into a segment (a ``memfd``, so nothing of it has a name or can
outlive its last user) and sends only a reference. The receiver opens the segment through ``/proc/<pid>/fd``, maps it,
and the arrays it unpickles lie in it. When the last of them is gone, it tells the owner, which uses the segment
again: pages that were touched before are written an order of magnitude faster than fresh ones.

A segment for one receiver is mapped shared, and the mapping is kept for the next message; the receiver may write to
it, as the owner does not look at it before it comes back. A segment for several receivers is mapped privately by
each (copy on write), so that they cannot see each other's changes.

Deaths: a dead receiver's segments come back at once; a dead owner's memory stays until the receivers drop it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from monarch_kernel import environment
from monarch_kernel.protocol.messages import Forget, Release, SegmentRef

_PAGE = mmap.PAGESIZE
_ALIGN = 64


class _Segment:
    """One piece of shared memory of the owner."""

    __slots__ = ("data", "fd", "holders", "number", "private", "seen_by", "size")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.fd = os.memfd_create(f"monarch-{number}", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.data = mmap.mmap(self.fd, size)
        self.holders: set[str] = set()
        self.seen_by: set[str] = set()
        self.private = False

    def close(self) -> None:
        self.data.close()
        os.close(self.fd)


class Segments:
    """The segments that this process owns, and those of others that it has mapped.

    Args:
        owner: this process's node id.
        send: ``send(proc, message)``, to tell receivers to forget a segment.
        say_late: the same for what can wait, from anywhere: to tell an owner that a segment is free.
    """

    def __init__(self, owner: str, send: Callable[[str, Any], Any], say_late: Callable[[str, Any], None]) -> None:
        self._owner = owner
        self._send = send
        self._say_late = say_late
        self._numbers = itertools.count(1)
        self._all: dict[int, _Segment] = {}
        self._free: dict[int, list[_Segment]] = {}  # by size
        self._total = 0
        self._idle = 0
        self._limit = environment.SEGMENT_LIMIT.get()
        self._keep = environment.SEGMENT_KEEP.get()
        self._lock = threading.RLock()
        self._mapped: dict[tuple[str, int], mmap.mmap] = {}

    # -- the owner's side -------------------------------------------------------------------------

    def put(self, pieces: list[Any], receivers: Iterable[str]) -> SegmentRef | None:
        """Copy bytes-like pieces into a segment for these procs; None if the limit is reached."""
        size = sum(memoryview(piece).nbytes for piece in pieces)
        holders = set(receivers)
        segment = self._take(size)
        if segment is None:
            return None
        segment.holders = holders
        segment.seen_by |= holders
        segment.private = len(holders) > 1
        at = 0
        data = segment.data
        for piece in pieces:
            view = memoryview(piece).cast("B")
            data[at : at + view.nbytes] = view
            at += view.nbytes
        return SegmentRef(self._owner, os.getpid(), segment.fd, segment.number, segment.size, segment.private)

    def _take(self, size: int) -> _Segment | None:
        size = _rounded(size)
        with self._lock:
            free = self._free.get(size)
            if free:
                segment = free.pop()
                self._idle -= size
                return segment
            if self._total + size > self._limit:
                return None
            self._total += size
        segment = _Segment(next(self._numbers), size)
        with self._lock:
            self._all[segment.number] = segment
        return segment

    def on_release(self, proc: str, number: int) -> None:
        """A receiver has dropped a segment of ours."""
        with self._lock:
            segment = self._all.get(number)
            if segment is None or proc not in segment.holders:
                return
            segment.holders.discard(proc)
            if segment.holders:
                return
            if self._idle + segment.size <= self._keep:
                self._free.setdefault(segment.size, []).append(segment)
                self._idle += segment.size
                return
            del self._all[number]
            self._total -= segment.size
        for other in segment.seen_by:
            self._send(other, Forget(number))
        segment.close()

    def on_peer_dead(self, proc: str) -> None:
        """Everything a dead process held comes back; what it owned is unmapped when it is dropped."""
        with self._lock:
            held = [s.number for s in self._all.values() if proc in s.holders]
            for segment in self._all.values():
                segment.seen_by.discard(proc)
            for key in [key for key in self._mapped if key[0] == proc]:
                del self._mapped[key]
        for number in held:
            self.on_release(proc, number)

    # -- the receiver's side -------------------------------------------------------------------------

    def received(self, ref: SegmentRef) -> Lease:
        """Take a reference that has arrived; the owner is told when the lease and all that was made of it are gone."""
        return Lease(self, ref)

    def map(self, ref: SegmentRef) -> mmap.mmap:
        """The segment's memory in this process."""
        key = (ref.owner, ref.number)
        with self._lock:
            known = self._mapped.get(key)
            if known is not None and not ref.private:
                return known
            fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                flags = mmap.MAP_PRIVATE if ref.private else mmap.MAP_SHARED
                memory = mmap.mmap(fd, ref.size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
            finally:
                os.close(fd)
            if not ref.private:
                self._mapped[key] = memory
            return memory

    def forget(self, owner: str, number: int) -> None:
        """The owner has given the segment up: drop our mapping of it."""
        with self._lock:
            self._mapped.pop((owner, number), None)

    def dropped(self, owner: str, number: int) -> None:
        """Called by finalizers: have the owner told, soon."""
        self._say_late(owner, Release(number))

    def close(self) -> None:
        """Give up everything; mappings that arrays still use stay until those are gone."""
        with self._lock:
            segments, self._all = list(self._all.values()), {}
            self._free.clear()
            self._mapped.clear()
        for segment in segments:
            segment.close()


class Lease:
    """A received reference. Dropped unread, it releases the segment; read, its memory does when the last view goes."""

    __slots__ = ("__weakref__", "_ref", "_segments")

    def __init__(self, segments: Segments, ref: SegmentRef) -> None:
        self._segments = segments
        self._ref: SegmentRef | None = ref

    def memory(self) -> memoryview:
        """The segment's bytes.

        Raises:
            ConnectionError: the owner is gone and has taken the segment with it.
        """
        ref = self._ref
        if ref is None:
            raise RuntimeError("a message's buffers can be read once")
        try:
            mapped = self._segments.map(ref)
        except OSError as e:
            raise ConnectionError(f"the large buffers of a message from {ref.owner} are gone with it: {e}") from e
        self._ref = None
        held = _held(ref.size).from_buffer(mapped)
        held.drop, held.owner, held.number = self._segments.dropped, ref.owner, ref.number
        return memoryview(held).cast("B")

    def __del__(self) -> None:
        if self._ref is not None:
            self._segments.dropped(self._ref.owner, self._ref.number)


@lru_cache(maxsize=256)  # there are few sizes, see below
def _held(size: int) -> Any:
    """A type of the bytes of a segment. Its end is the end of the last array that lies in there.

    A ctypes array exports the mapping's memory and, unlike a memoryview of it, is kept alive by every view of a view.
    """
    return type("Held", (ctypes.c_char * size,), {"drop": None, "__del__": _drop})


def _drop(held: Any) -> None:
    if held.drop is not None:
        held.drop(held.owner, held.number)


def _rounded(size: int) -> int:
    """Few sizes, so that segments fit again: at most an eighth more than asked for."""
    size = max(size, _PAGE * 16)
    step = max(_PAGE, 1 << (size.bit_length() - 4))
    return -(-size // step) * step
