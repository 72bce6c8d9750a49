"""Any implementation of Monarch's actor API: this project (peer `ours`), or torchmonarch.

Sync endpoints and `.get()`, on proc meshes of `this_host()`; `_async` metrics have `async def`
endpoints, `call1_await` awaits under asyncio.  Both peers run exactly this code.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import signal
import sys
import threading
import time
from importlib.metadata import version as installed
from typing import Any

import numpy as np

from bench.measure import (
    PEER,
    QUICK,
    SCALE,
    SIZES,
    bandwidth,
    describe,
    emit,
    emit_memory,
    latency,
    note,
    percentile,
    rate,
    run,
    sample,
    threads,
    version,
)

_start = time.perf_counter()
# Any: the name stands for two libraries with one API.
api: Any = importlib.import_module("monarch_kernel.actor" if PEER == "ours" else "monarch.actor")
IMPORT_S = time.perf_counter() - _start
Actor: Any = api.Actor
endpoint: Any = api.endpoint
this_host: Any = api.this_host


def ones(n: int, as_torch: bool) -> Any:
    """Return n bytes."""
    if as_torch:
        import torch

        return torch.ones(n, dtype=torch.uint8)
    return np.ones(n, np.uint8)


class Sync(Actor):
    """Sync endpoints, in a separate class because a class may not mix them with async ones."""

    kept: Any = None

    @endpoint
    def noop(self, s: str) -> str:
        return s

    @endpoint
    def pid(self) -> tuple[int, bool]:
        return os.getpid(), "torch" in sys.modules

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def nbytes(self, x: Any) -> int:
        return x.nbytes

    @endpoint
    def make(self, n: int, as_torch: bool) -> Any:
        return ones(n, as_torch)

    @endpoint
    def held(self, n: int, as_torch: bool) -> Any:
        """Return an existing array: the result is moved, not created."""
        if self.kept is None or self.kept.nbytes != n:
            self.kept = ones(n, as_torch)
        return self.kept

    @endpoint
    def import_torch(self) -> str:
        import torch

        return torch.__version__


class Async(Actor):
    """The same endpoints as coroutines, and the caller of another actor."""

    @endpoint
    async def noop(self, s: str) -> str:
        return s

    @endpoint
    async def call_peer(self, other: Any, n: int) -> list[float]:
        times = []
        for _ in range(n):
            start = time.perf_counter()
            await other.noop.call_one("w")
            times.append(time.perf_counter() - start)
        return times


def spawn(n: int, cls: Any = Sync) -> tuple[Any, Any]:
    """Spawn a mesh of n processes, and an actor on each."""
    procs = this_host().spawn_procs({"gpus": n})
    return procs, procs.spawn("a", cls)


def pids_of(actors: Any) -> list[int]:
    return [v[0] for _, v in actors.pid.call().get().items()]


def spawn_n(n: int) -> None:
    """Spawn twice: the first spawn includes the start of the runtime in the controller."""
    for tag in ("", "_again"):
        start = time.perf_counter()
        procs, actors = spawn(n)
        actors.noop.call("w").get()
        emit(f"spawn_{n}{tag}_s", round(time.perf_counter() - start, 4))
        if tag:
            emit_memory(f"rss_{n}_mb", pids_of(actors))
            latency(f"bcast{n}", lambda actors=actors: actors.noop.call("w").get(), 3)
        start = time.perf_counter()
        procs.stop().get()
        emit(f"stop_{n}{tag}_s", round(time.perf_counter() - start, 4))


def calls() -> None:
    """Measure round trips, fan-out and rates, with sync and with async endpoints."""
    for tag, cls in (("", Sync), ("_async", Async)):
        procs, actors = spawn(8, cls)
        actors.noop.call("w").get()
        one, two = actors.slice(gpus=0), actors.slice(gpus=1)
        _calls(tag, actors, one)
        if cls is Async:
            # As long as the other latencies take, so that a short load by other work does not affect all samples.
            usual = percentile(one.call_peer.call_one(two, 200).get(), 0.5)
            times = one.call_peer.call_one(two, min(5000, max(300, int(1.5 * SCALE / usual)))).get()
            emit("a2a_us", round(percentile(times, 0.5) * 1e6, 1), n=len(times))
            emit("a2a_p99_us", round(percentile(times, 0.99) * 1e6, 1), n=len(times))
        asyncio.run(_awaited(tag, one))
        procs.stop().get()


def _calls(tag: str, actors: Any, one: Any) -> None:
    latency("call1" + tag, lambda: one.noop.call_one("w").get(), 2)
    latency("bcast8" + tag, lambda: actors.noop.call("w").get(), 2)

    def pipelined() -> None:
        for future in [one.noop.call_one("w") for _ in range(1000)]:
            future.get()

    def cast() -> None:
        for _ in range(1000):
            actors.noop.broadcast("w")
        actors.noop.call("w").get()

    rate("pipelined_per_s" + tag, pipelined, 1000)
    rate("cast8_per_s" + tag, cast, 1000)


async def _awaited(tag: str, one: Any) -> None:
    times = []
    for _ in range(1000):
        start = time.perf_counter()
        await one.noop.call_one("w")
        times.append(time.perf_counter() - start)
    emit(f"call1_await{tag}_us", round(percentile(times[100:], 0.5) * 1e6, 1), n=900)


def rss() -> None:
    """Measure the memory of an idle rank, before and after it imports torch."""
    procs, actors = spawn(8)
    found = actors.pid.call().get()
    pids = [v[0] for _, v in found.items()]
    emit_memory("rss_idle_mb", pids, torch=any(v[1] for _, v in found.items()))
    emit("threads_per_proc", threads(pids))
    emit("import_s", round(IMPORT_S, 3))
    emit_memory("rss_controller_mb", [os.getpid()])
    if not QUICK:
        actors.import_torch.call().get()
        emit_memory("rss_torch_mb", pids)
    procs.stop().get()


def payload() -> None:
    """Measure arrays as argument and as result, between the controller and one rank."""
    procs, actors = spawn(1)
    one = actors.slice(gpus=0)
    for size, n in SIZES.items():
        x = np.ones(n, np.uint8)
        bandwidth(f"payload_in_{size}", n, lambda x=x: one.nbytes.call_one(x).get())
        bandwidth(f"payload_held_{size}", n, lambda n=n: one.held.call_one(n, False).get())
        bandwidth(f"payload_out_{size}", n, lambda n=n: one.make.call_one(n, False).get())
    try:
        import torch
    except ImportError:
        note("payload_in_torch_64MB_GBps", "torch is not installed")
    else:
        n = SIZES["64MB"]
        t = torch.ones(n, dtype=torch.uint8)
        bandwidth("payload_in_torch_64MB", n, lambda: one.nbytes.call_one(t).get())
        bandwidth("payload_held_torch_64MB", n, lambda: one.held.call_one(n, True).get())
        bandwidth("payload_out_torch_64MB", n, lambda: one.make.call_one(n, True).get())
    procs.stop().get()
    cast()


def cast() -> None:
    """Send the same 64 MB to 8 ranks, and compare the time with one rank."""
    procs, actors = spawn(8)
    x = np.ones(SIZES["64MB"], np.uint8)
    one = actors.slice(gpus=0)
    least = 2 if QUICK else 5
    to_one = sample(lambda: one.nbytes.call(x).get(), 1.0, least, 40)
    to_all = sample(lambda: actors.nbytes.call(x).get(), 1.0, least, 40)
    emit("cast_64MB_8_over_1", round(percentile(to_all, 0.5) / percentile(to_one, 0.5), 2), n=len(to_all))
    procs.stop().get()


def bulk() -> None:
    """Measure one-sided transfers, in a separate module so that Monarch's RDMA is imported only for this."""
    from bench.peers import rdma_buffers

    rdma_buffers.bulk()


def fail() -> None:
    """SIGKILL one of 8 ranks while a call is pending on all, and while idle (until a call fails).

    At a random moment, so that the kill does not coincide with the polling period of a runtime.
    """
    api.unhandled_fault_hook = lambda failure: None
    for kind in ("pending",) if QUICK else ("pending", "idle"):
        _, actors = spawn(8)
        pids = pids_of(actors)
        pending = actors.sleep.call(60) if kind == "pending" else None
        time.sleep(random.uniform(1, 11))
        start = time.perf_counter()
        os.kill(pids[3], signal.SIGKILL)
        error = "none"
        try:
            if pending is not None:
                pending.get(timeout=120)
            while pending is None and time.perf_counter() < start + 120:
                actors.noop.call("w").get(timeout=120)
        except Exception as e:
            error = describe(e)
        emit(f"fail_{kind}_s", round(time.perf_counter() - start, 4), error=error)
        # The mesh is not stopped: in some implementations, a mesh with a dead rank cannot be stopped.


if __name__ == "__main__":
    if PEER == "ours":
        from monarch_kernel._version import __version__

        version(monarch_kernel=__version__)
    else:
        version(torchmonarch=installed("torchmonarch"), torch=installed("torch"))
    run(
        {
            "spawn8": lambda: spawn_n(8),
            "spawn32": lambda: spawn_n(32),
            "calls": calls,
            "rss": rss,
            "payload": payload,
            "bulk": bulk,
            "fail": fail,
        }
    )
    sys.stdout.flush()
    # A shutdown that hangs must not delay the run.
    watchdog = threading.Timer(20, lambda: os._exit(1))
    watchdog.daemon = True
    watchdog.start()
