"""Memory for blocks that is used again and again."""

from __future__ import annotations

import mmap
import threading

#: How much memory that nothing uses is kept (bytes).
KEPT_FREE = 32 << 20
_SMALLEST = 64 << 10


class BlockPool:
    """Memory of one sync for its blocks. Any thread may use it.

    Fresh memory is cleared by the system page by page, which takes longer than to copy a block into it. What is in use
    when the pool goes is the system's again with its last reference: from the heap of several threads it would not be,
    as freed blocks lie between what stays, and processes keep growing.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """Memory of a size (bytes), with any content."""
        room = max(_SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            free = self._free.get(room)
            if free:
                self._size -= room
                return memoryview(free.pop())[:size]
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            pass  # a kernel without them
        return memoryview(memory)[:size]

    def give(self, memory: memoryview) -> None:
        """Give back what ``take`` gave and nothing reads or writes any more."""
        whole = memory.obj
        if isinstance(whole, mmap.mmap):
            with self._lock:
                if self._size + len(whole) <= KEPT_FREE:
                    self._size += len(whole)
                    self._free.setdefault(len(whole), []).append(whole)
