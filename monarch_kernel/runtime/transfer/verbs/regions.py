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
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from monarch_kernel import environment
from monarch_kernel.runtime.transfer.memory import Layout, Memory
from monarch_kernel.runtime.transfer.verbs.card import Card
from monarch_kernel.runtime.transfer.verbs.gpu import register

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


def owner_of(memory: Memory) -> Any:
    """Return the array that owns the memory, which is freed with it; None if unknown."""
    numpy = sys.modules.get("numpy")
    root: Any = memory.keep
    if numpy is None or not isinstance(root, numpy.ndarray):
        return None
    while isinstance(root.base, numpy.ndarray):
        root = root.base
    return root if root.flags.owndata else None
