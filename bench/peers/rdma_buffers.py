"""One-sided reads and writes between two actors of one host, for any implementation of Monarch's RDMA API."""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np

from bench.measure import PEER, QUICK, emit, percentile

api: Any = importlib.import_module("monarch_kernel.actor" if PEER == "ours" else "monarch.actor")
Actor: Any = api.Actor
endpoint: Any = api.endpoint

SIZES = {"64MB": 64 << 20} if QUICK else {"4KB": 4 << 10, "64MB": 64 << 20, "1GB": 1 << 30}


def _rdma() -> Any:
    return importlib.import_module("monarch_kernel.rdma" if PEER == "ours" else "monarch.rdma")


class Ends(Actor):
    """An actor that owns a buffer, or accesses another actor's."""

    @endpoint
    async def own(self, n: int) -> Any:
        self.data = np.ones(n, np.uint8)
        self.buffer = _rdma().RDMABuffer(self.data.data)
        return self.buffer

    @endpoint
    async def drop(self) -> None:
        await self.buffer.drop()
        del self.data

    @endpoint
    async def transfer(self, buffer: Any, n: int, write: bool, repeats: int) -> list[float]:
        mine = np.ones(n, np.uint8).data
        move = buffer.write_from if write else buffer.read_into
        times: list[float] = []
        for _ in range(repeats):
            start = time.perf_counter()
            await move(mine)
            times.append(time.perf_counter() - start)
        return times


def bulk() -> None:
    """Measure the GB/s of `read_into` and `write_from`."""
    procs = api.this_host().spawn_procs({"gpus": 2})
    actors = procs.spawn("ends", Ends)
    owner, other = actors.slice(gpus=0), actors.slice(gpus=1)
    for size, n in SIZES.items():
        buffer = owner.own.call_one(n).get()
        repeats = 5 if n > 1 << 28 else 12 if n > 1 << 20 else 400
        for name, write in (("read", False), ("write", True)):
            times = other.transfer.call_one(buffer, n, write, repeats).get()[2:]
            median = percentile(times, 0.5)
            emit(f"bulk_{name}_{size}_GBps", round(n / median / 1e9, 4), us=round(median * 1e6, 1), n=len(times))
        owner.drop.call_one().get()
    procs.stop().get()
