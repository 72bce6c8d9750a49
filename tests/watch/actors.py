"""Actors for tests of the watch."""

from __future__ import annotations

import asyncio
from typing import Any

from monarch_kernel.actor import Actor, ActorMesh, concurrent_endpoint, endpoint, span
from monarch_kernel.rdma import RDMABuffer


class Worker(Actor):
    """Does what a trace shows."""

    def __init__(self) -> None:
        self._memory = bytearray(1 << 16)

    @endpoint
    def work(self, number: int = 0) -> int:
        """A span within an endpoint."""
        with span("inner"):
            return number + 1

    @endpoint
    def fail(self) -> None:
        """Raises."""
        raise ValueError("on purpose")

    @endpoint
    def memory(self) -> RDMABuffer:
        """Memory of this rank."""
        return RDMABuffer(memoryview(self._memory))

    @endpoint
    def call_on(self, others: ActorMesh[Any]) -> Any:
        """Calls from one actor to others."""
        return others.work.call(5).get()

    @endpoint
    def reduce(self) -> float:
        """Collectives, on the process group of this mesh."""
        import torch
        import torch.distributed as dist

        found = torch.ones(1000)
        dist.all_reduce(found)
        dist.barrier()
        return float(found[0])


class Concurrent(Actor):
    """Endpoints that overlap on one thread."""

    def __init__(self) -> None:
        self._both = asyncio.Event()
        self._here = 0

    @concurrent_endpoint
    async def meet(self) -> int:
        """Returns when two calls of it have come."""
        with span("waiting"):
            self._here += 1
            if self._here == 2:
                self._both.set()
            await self._both.wait()
        return self._here
