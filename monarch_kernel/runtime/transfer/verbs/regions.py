"""Memory of this process that is registered with a card: regions kept for later transfers, and staging buffers.

Registering memory pins all its pages, which may cost more than the transfer itself, so regions are kept. But a region
refers to physical pages: if the memory were freed and its addresses reused, a kept region would silently read and
write stale pages. So a region is kept only while it certainly refers to the same pages:

* An array that owns its data: a weak reference to it ends the region just before the data is freed. (NumPy refuses to
  resize an array in place while there are weak references to it.)
* Memory that this process has registered as an ``RDMABuffer``: until that is dropped. The registration keeps it alive
  anyway.

Everything else is registered for one transfer: what a ``bytearray``, an ``mmap`` or a foreign library does with its
memory is not observable, and a tensor's storage may be resized in place, to other pages at the same address, without a
trace. The cache keeps no memory alive.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from monarch_kernel import environment
from monarch_kernel.runtime.transfer.errors import Unfit
from monarch_kernel.runtime.transfer.memory import Layout, Memory
from monarch_kernel.runtime.transfer.verbs.card import Card, pyverbs

# Register GPU memory with RDMA cards: through CUDA's dma-buf, or by address if nvidia-peermem is loaded.

_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
_PAGE = os.sysconf("SC_PAGE_SIZE")


def register(card: Card, memory: Memory, *, remote: bool, writable: bool) -> tuple[Any, int]:
    """Register memory of any device with a card.

    Args:
        remote, writable: as in ``Card.register``.

    Returns:
        The region, and the offset from an address to the one that the card uses.

    Raises:
        Unfit: the memory cannot be registered; the message has the reason.
    """
    low, high = memory.layout.span()
    if not memory.device:
        return card.register(low, high - low, remote=remote, writable=writable), 0
    if memory.ready is not None:
        memory.ready.synchronize()  # also makes the device's context current in this thread
    start = low // _PAGE * _PAGE
    fd = _exported(start, -(-high // _PAGE) * _PAGE - start)
    if fd is None:
        return card.register(low, high - low, remote=remote, writable=writable, populate=False), 0
    try:
        # The card addresses the memory by its offset in the dma-buf.
        return card.register_dmabuf(fd, low - start, high - low, remote=remote, writable=writable), -start
    finally:
        os.close(fd)  # the region keeps the memory


@cache
def _cuda() -> Any:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        cuda.cuMemGetHandleForAddressRange.argtypes = (
            ctypes.POINTER(ctypes.c_int),
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_ulonglong,
        )
        cuda.cuPointerSetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    except (OSError, AttributeError) as e:
        raise Unfit(f"the CUDA driver cannot share GPU memory with other devices ({e})") from None
    return cuda


def _exported(start: int, size: int) -> int | None:
    """Return a dma-buf of device memory; None if the driver cannot export one."""
    cuda, fd, yes = _cuda(), ctypes.c_int(-1), ctypes.c_uint(1)
    # Makes copies by the GPU complete when they are reported as complete, also for cards that read the memory
    # afterwards.
    cuda.cuPointerSetAttribute(ctypes.byref(yes), _SYNC_MEMOPS, start)
    error = cuda.cuMemGetHandleForAddressRange(ctypes.byref(fd), start, size, _DMA_BUF_FD, 0)
    return None if error else fd.value


# Queue pairs of the requester: a transfer is split into work requests, which several of them run.

#: (address here, address there, length)
Work = tuple[int, int, int]

#: The maximum number of work requests posted at once. The last one reports completion.
BATCH = 16
#: The maximum number of bytes in flight on one queue pair.
WINDOW = 32 << 20
#: How long completions are polled without a pause, and the longest pause between two polls (seconds).
SPIN, PAUSE = 50e-6, 1e-3


class WorkFailure(Exception):
    """A work request failed, and its queue pair is no longer usable.

    Attributes:
        status: ``IBV_WC_*``.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class MemoryKeys:
    """The keys with which the local card addresses the local memory, and the owner's card the buffer."""

    lkey: int
    rkey: int
    here: int = 0  # offset to add to a local address
    there: int = 0  # offset to add to an address of the owner


class QueuePair:
    """A queue pair that starts transfers, used by one transfer at a time."""

    def __init__(self, card: Card) -> None:
        self.card = card
        v = pyverbs()
        self._v = v
        self._signaled, self._success = int(v.e.IBV_SEND_SIGNALED), int(v.e.IBV_WC_SUCCESS)
        self._flushed = int(v.e.IBV_WC_WR_FLUSH_ERR)
        self.queue = card.completion_queue()
        try:
            self.pair, self.end = card.queue_pair(self.queue)
        except BaseException:
            card.end(self.queue)
            raise
        self._posted = self._done = 0
        self._sent: list[tuple[int, int]] = []  # (number of a batch's last request, its bytes)
        self._bytes = 0

    @property
    def idle(self) -> bool:
        """Whether no work request is in flight."""
        return self._done == self._posted

    def close(self) -> None:
        """Close the queue pair. Work requests in flight end, and access no memory afterwards."""
        self.card.end(self.pair)
        self.card.end(self.queue)

    def staging(self) -> int:
        """Return how many work requests it can accept now."""
        return 0 if self._bytes >= WINDOW else self.card.depth - (self._posted - self._done)

    def post(self, works: list[Work], opcode: int, keys: MemoryKeys) -> None:
        """Post work requests to the card."""
        v = self._v
        self._posted += len(works)
        number, flags = self._posted, self._signaled
        after: Any = None
        made: list[Any] = []
        for here, there, length in reversed(works):
            piece = v.SGE(here + keys.here, length, keys.lkey)
            after = v.SendWR(number, opcode, 1, 0, [piece], flags, after)
            after.set_wr_rdma(keys.rkey, there + keys.there)
            made += piece, after
            flags = 0
        try:
            self.pair.post_send(after)
        except v.PyverbsError:
            raise WorkFailure(-1) from None
        finally:
            for thing in made:
                thing.close()  # they free nothing when they are collected
        size = sum(length for _, _, length in works)
        self._sent.append((number, size))
        self._bytes += size

    def poll(self) -> bool:
        """Return whether work requests have completed since the last call.

        Raises:
            Failed: a work request failed.
        """
        count, reports = self.queue.poll(BATCH)
        for report in reports:
            if report.status != self._success:
                raise WorkFailure(int(report.status))
            self._done = report.wr_id
        while self._sent and self._sent[0][0] <= self._done:
            self._bytes -= self._sent.pop(0)[1]
        return count > 0


def drive(
    queue_pairs: list[tuple[QueuePair, MemoryKeys]], todo: Iterator[Work], write: bool, check: Callable[[], None]
) -> None:
    """Run all work requests, each on a queue pair with free capacity.

    Args:
        check: called repeatedly; it raises to end the transfer.

    Raises:
        Failed: a work request failed.
    """
    e = pyverbs().e
    opcode = int(e.IBV_WR_RDMA_WRITE if write else e.IBV_WR_RDMA_READ)
    more = True
    quiet = time.monotonic()
    while True:
        check()
        moved = False
        for queue_pair, keys in queue_pairs:
            if more and (staging := queue_pair.staging()):
                batch = _batch(todo, min(staging, BATCH))
                more = bool(batch)
                if batch:
                    queue_pair.post(batch, opcode, keys)
                    moved = True
            if not queue_pair.idle and queue_pair.poll():
                moved = True
        if not more and all(queue_pair.idle for queue_pair, _ in queue_pairs):
            return
        now = time.monotonic()
        if moved:
            quiet = now
        elif now - quiet > SPIN:
            # The pause is proportional to the wait so far: long waits cost little CPU time, and short ones stay short.
            time.sleep(min((now - quiet) / 4, PAUSE))


def _batch(todo: Iterator[Work], staging: int) -> list[Work]:
    """Return the next work requests: many small pieces, or one large piece."""
    batch: list[Work] = []
    size = 0
    for work in islice(todo, staging):
        batch.append(work)
        size += work[2]
        if size >= 1 << 18:
            break
    return batch


#: The maximum size of transfers, and of pieces of scattered ones, that use permanently registered memory (bytes).
SMALL = 64 << 10
STAGE = 2 << 20


#: The identity of the memory's owner (an object's id, or the key of a registration), and the first and last address.
Key = tuple[int, int, int]


class MemoryRegion:
    """Registered memory of this process."""

    __slots__ = ("_card", "_handle", "lkey", "shift", "size", "users", "watch", "writable")

    def __init__(self, card: Card, memory: Memory, writable: bool) -> None:
        low, high = memory.layout.span()
        self._card = card
        self.size = high - low
        self.writable = writable
        #: ``shift`` is the offset from an address to the one that the card uses.
        self._handle, self.shift = register(card, memory, remote=False, writable=writable)
        self.lkey: int = self._handle.lkey
        self.watch: Any = None  # the weak reference that closes it
        self.users = 1

    def close(self, *, wait: bool = True) -> bool:
        """Deregister the region; ``wait`` as in ``Card.end``."""
        return self._card.end(self._handle, wait=wait)


class RegionCache:
    """The regions of this process on one card, for transfers that start here."""

    def __init__(self, card: Card) -> None:
        self._card = card
        # Weak references call back at any point, so this is changed and copied only by single operations.
        self._kept: dict[Key, MemoryRegion] = {}
        self._left: list[MemoryRegion] = []  # still to close: their memory was freed while the card was in use
        self._guard = threading.Lock()
        self._staging: list[StagingBuffer] = []
        self._pid = os.getpid()
        #: The numbers of cache hits and misses.
        self.hits = self.misses = 0

    @contextmanager
    def lent(self, memory: Memory, writing: bool, buffer: int) -> Generator[MemoryRegion, None, None]:
        """Provide a region for one transfer.

        Args:
            writing: the card writes to it.
            buffer: the registration of this process that the memory lies in; 0 for none.

        Raises:
            Unfit: it cannot be registered.
        """
        left, self._left = self._left, []
        for region in left:
            region.close()
        root = owner_of(memory)
        key = (buffer or id(root), *memory.layout.span())
        keep = bool(buffer) or root is not None
        region = self._find(key, writing) if keep else None
        if region is None:
            self.misses += 1
            region = MemoryRegion(self._card, memory, writing or (keep and not memory.why_readonly))
            if keep:
                self._end(key)  # an existing one is read-only
                if not buffer:
                    region.watch = weakref.ref(root, lambda _: self._lost(key))
                self._kept[key] = region
                self._trim()
        try:
            yield region
        finally:
            with self._guard:
                region.users -= 1
                last = not region.users and self._kept.get(key) is not region
            if last:
                region.close()

    def _find(self, key: Key, writing: bool) -> MemoryRegion | None:
        with self._guard:
            region = self._kept.get(key)
            if region is None or (writing and not region.writable):
                return None
            region.users += 1
            self.hits += 1
            self._kept[key] = self._kept.pop(key, region)  # the most recently used come last
            return region

    def _lost(self, key: Key) -> None:
        """Remove the region of memory that is about to be freed, so nothing uses it.

        Called at any point: must not wait.
        """
        region = self._kept.pop(key, None)
        if region is not None and os.getpid() == self._pid and not region.close(wait=False):
            self._left.append(region)  # it can no longer be found, so it may be closed later

    def dropped(self, buffer: int) -> None:
        """Close the regions of a dropped registration of this process."""
        for key in [key for key in self._kept.copy() if key[0] == buffer]:
            self._end(key)

    def _end(self, key: Key) -> None:
        """Remove a region. Its last user closes it, if it has one."""
        with self._guard:
            region = self._kept.pop(key, None)
            unused = region is not None and not region.users
        if region is not None and unused:
            region.close()

    def _trim(self) -> None:
        kept = self._kept.copy()
        total = sum(region.size for region in kept.values())
        left = len(kept)
        most, most_bytes = environment.RDMA_REGIONS.get(), environment.RDMA_REGION_BYTES.get()
        for key, region in kept.items():
            if left <= most and total <= most_bytes:
                return
            left -= 1
            total -= region.size
            self._end(key)

    @contextmanager
    def staging(self, size: int) -> Generator[StagingBuffer, None, None]:
        """Provide contiguous registered memory of at least this size, to stage a transfer.

        Raises:
            Unfit: it cannot be registered.
        """
        if size > STAGE:
            staging = StagingBuffer(self._card, size)
            try:
                yield staging
            finally:
                staging.close()
            return
        with self._guard:
            staging = self._staging.pop() if self._staging else None
        staging = staging or StagingBuffer(self._card, STAGE)
        try:
            yield staging
        finally:
            with self._guard:
                self._staging.append(staging)


class StagingBuffer:
    """Contiguous memory that is permanently registered."""

    def __init__(self, card: Card, size: int) -> None:
        self._card = card
        self._memory = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._handle: Any = card.register(self.address, size, remote=False, writable=True)
        self.lkey: int = self._handle.lkey

    def layout(self, size: int) -> Layout:
        """Return the layout of its first bytes."""
        return Layout(self.address, (), size)

    def close(self) -> None:
        """Deregister the memory."""
        self._card.end(self._handle)


def owner_of(memory: Memory) -> object:
    """Return the array that owns the memory, which is freed with it; None if unknown."""
    numpy = sys.modules.get("numpy")
    root = memory.keep
    if numpy is None or not isinstance(root, numpy.ndarray):
        return None
    while isinstance(root.base, numpy.ndarray):
        root = root.base
    return root if root.flags.owndata else None
