"""Actors that can be found in all kinds of places."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

from monarch_kernel.actor import Actor, concurrent_endpoint, current_rank, endpoint


class Trainer(Actor):
    """Waits for its gate in a place that depends on its rank."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.rank = current_rank().rank

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def step(self, odd: int) -> None:
        """Rank `odd` goes elsewhere than the others."""
        batch = {"rank": self.rank, "size": 32}
        if self.rank == odd:
            self.load(batch)
        else:
            self.reduce(batch)

    def load(self, batch: dict[str, int]) -> None:
        self.here()

    def reduce(self, batch: dict[str, int]) -> None:
        self.here()

    def here(self) -> None:
        """Wait to be let go."""
        with open(os.path.join(self.folder, "gate"), "w") as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)  # the test has it, until it lets all go

    @endpoint
    def recurse(self, depth: int) -> None:
        self.down(depth + self.rank)

    def down(self, depth: int) -> None:
        if depth:
            self.down(depth - 1)
        else:
            self.here()

    @endpoint
    def hold(self) -> None:
        """Keep the interpreter lock in native code, until we are let go."""
        with open(os.path.join(self.folder, "gate"), "w") as gate:
            ctypes.PyDLL(None).flock(gate.fileno(), fcntl.LOCK_SH)

    @endpoint
    def stop_here(self) -> None:
        """For the debugger."""
        breakpoint()

    @endpoint
    def start_thread(self) -> None:
        """A thread of the user's own, besides."""
        threading.Thread(target=self.here, daemon=True).start()


class Loader(Actor):
    """Waits in several tasks at once."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    @endpoint
    async def release(self) -> None:
        self.opened.set()

    @concurrent_endpoint
    async def go(self) -> Any:
        background = asyncio.create_task(self.prefetch(), name="prefetch")
        started = asyncio.Event()
        await asyncio.gather(self.one(started), self.two(started))
        return await background

    async def one(self, started: asyncio.Event) -> None:
        await asyncio.wait_for(self.opened.wait(), 60)

    async def two(self, started: asyncio.Event) -> None:
        await self.opened.wait()

    async def prefetch(self) -> int:
        async for _ in self.batches():
            pass
        return 1

    async def batches(self) -> AsyncIterator[int]:
        await self.opened.wait()
        yield 1
