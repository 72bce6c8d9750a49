"""Share large buffers between processes of one host, through shared-memory segments that the receiver maps.

The sender copies a message's out-of-band buffers into a segment (a ``memfd``, which has no name and cannot outlive its
last user) and sends only a reference. The receiver opens the segment through ``/proc/<pid>/fd`` and maps it; the arrays
that it unpickles use that memory. When the last array is gone, the receiver notifies the owner, which reuses the
segment: writing to pages touched before is an order of magnitude faster than to fresh ones.

A segment for one receiver is mapped shared, and the mapping is kept for the next message. The receiver may write to it,
because the owner does not read it before it is released. Several receivers each map a segment privately (copy on
write), so that they cannot see each other's changes.

Deaths: a dead receiver's segments are released at once. A dead owner's memory stays until the receivers drop it.
"""

from __future__ import annotations

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
        send: ``send(proc, message)``, which makes receivers drop their mapping of a segment.
        say_late: like ``send``, but deferred and callable from anywhere; it notifies an owner that a segment is
            released.
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
        """Copy bytes-like pieces into a segment for these procs, and return its reference.

        None: the limit is reached.
        """
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
        size = rounded(size)
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
        """Release a receiver's hold on a segment of this process."""
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
        """Release all segments that a dead process held. Its own segments are unmapped when their users drop them."""
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
        """Create the lease of a received reference.

        The owner is notified when the lease and everything made from it are deleted.
        """
        return Lease(self, ref)

    def map(self, ref: SegmentRef) -> mmap.mmap:
        """Map a segment into this process, or reuse its mapping."""
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
        """Drop this process's mapping of a segment that its owner has freed."""
        with self._lock:
            self._mapped.pop((owner, number), None)

    def dropped(self, owner: str, number: int) -> None:
        """Notify the owner soon that a segment was released. Finalizers call this."""
        self._say_late(owner, Release(number))

    def close(self) -> None:
        """Release everything. Mappings that arrays still use stay until those are gone."""
        with self._lock:
            segments, self._all = list(self._all.values()), {}
            self._free.clear()
            self._mapped.clear()
        for segment in segments:
            segment.close()


class Lease:
    """A received reference. If it is dropped unread, it releases the segment; after a read, the last view does."""

    __slots__ = ("__weakref__", "_ref", "_segments")

    def __init__(self, segments: Segments, ref: SegmentRef) -> None:
        self._segments = segments
        self._ref: SegmentRef | None = ref

    def memory(self) -> memoryview:
        """Map the segment and return its bytes.

        Raises:
            ConnectionError: the owner has died, and the segment is lost.
        """
        ref = self._ref
        if ref is None:
            raise RuntimeError("a message's buffers can be read once")
        try:
            mapped = self._segments.map(ref)
        except OSError as e:
            raise ConnectionError(f"the large buffers of a message from {ref.owner} are gone with it: {e}") from e
        self._ref = None
        dropped = self._segments.dropped
        return leased(mapped, ref.size, lambda: dropped(ref.owner, ref.number))

    def __del__(self) -> None:
        if self._ref is not None:
            self._segments.dropped(self._ref.owner, self._ref.number)


def leased(memory: mmap.mmap | memoryview, size: int, drop: Callable[[], None]) -> memoryview:
    """Return the first ``size`` bytes of memory.

    ``drop`` is called when they and everything made from them are deleted.
    """
    held = _held(size).from_buffer(memory)
    held.drop = drop
    return memoryview(held).cast("B")


@lru_cache(maxsize=256)  # there are few sizes, see `rounded`
def _held(size: int) -> Any:
    """Create a type for the bytes of a segment. An instance lives until the last array in the segment is deleted.

    A ctypes array exports the mapping's memory and, unlike a memoryview, is kept alive by every view of a view.
    """
    import ctypes

    return type("Held", (ctypes.c_char * size,), {"drop": None, "__del__": _drop})


def _drop(held: Any) -> None:
    if held.drop is not None:
        held.drop()


def rounded(size: int) -> int:
    """Round up to one of few sizes, so that segments can be reused; adds at most an eighth."""
    size = max(size, _PAGE * 16)
    step = max(_PAGE, 1 << (size.bit_length() - 4))
    return -(-size // step) * step
