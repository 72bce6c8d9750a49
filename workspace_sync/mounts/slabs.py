"""Memory from which other processes read blocks: a few pieces that are lent again and again, registered once."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import time

from monarch_kernel.rdma import RDMABuffer

#: How many blocks are lent at a time.
SLABS = 8
#: A process that has not given a block back after so long has ended (seconds).
LEASE = 60.0


class Slab:
    """Memory that is registered for other processes."""

    def __init__(self, size: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, size))
        self.buffer = RDMABuffer(self.memory)


class Slabs:
    """Lends memory, one loan for each reader. Belongs to one event loop."""

    def __init__(self) -> None:
        self._slabs: list[Slab] = []
        self._free: asyncio.Queue[Slab] = asyncio.Queue()
        self._loans: dict[int, tuple[Slab, float]] = {}
        self._numbers = itertools.count(1)

    async def get(self, size: int) -> Slab:
        """Memory of at least this size; waits until there is some."""
        while True:
            if self._free.empty() and len(self._slabs) < SLABS:
                self._slabs.append(Slab(size))
                return self._slabs[-1]
            try:
                slab = await asyncio.wait_for(self._free.get(), 1.0)
            except TimeoutError:
                late = time.monotonic() - LEASE
                for loan in [loan for loan, (_, since) in self._loans.items() if since < late]:
                    self.give_back(loan)
                continue
            if len(slab.memory) >= size:
                return slab
            self._slabs.remove(slab)
            await slab.buffer.drop()

    def lend(self, slab: Slab) -> int:
        """Note that another process reads from it; returns what it gives back when it is done."""
        loan = next(self._numbers)
        self._loans[loan] = (slab, time.monotonic())
        return loan

    def give_back(self, loan: int) -> None:
        """The reader is done."""
        held = self._loans.pop(loan, None)
        if held is not None:
            self.free(held[0])

    def free(self, slab: Slab) -> None:
        """Memory from ``get`` that is not lent."""
        self._free.put_nowait(slab)
