"""Dask distributed: one Actor per single-threaded worker process of a LocalCluster."""

# The peer is installed in a separate environment, which no checker sees.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from bench.measure import (
    SIZES,
    bandwidth,
    describe,
    emit,
    emit_memory,
    latency,
    percentile,
    rate,
    run,
    threads,
    version,
)

_start = time.perf_counter()
import distributed  # noqa: E402 - its import is timed

IMPORT_S = time.perf_counter() - _start


class Echo:
    """The object in each worker."""

    kept: Any = None

    def noop(self, s: str) -> str:
        return s

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def nbytes(self, x: Any) -> int:
        return x.nbytes

    def make(self, n: int) -> Any:
        return np.ones(n, np.uint8)

    def held(self, n: int) -> Any:
        """Return an existing array: the result is moved, not created."""
        if self.kept is None or self.kept.nbytes != n:
            self.kept = np.ones(n, np.uint8)
        return self.kept

    async def call_peer(self, other: Any, n: int) -> list[float]:
        times = []
        for _ in range(n):
            begin = time.perf_counter()
            await other.noop("w")
            times.append(time.perf_counter() - begin)
        return times


class Mesh:
    """A cluster with one actor on each of n workers; `took` is the time until all had answered."""

    def __init__(self, n: int) -> None:
        begin = time.perf_counter()
        self.cluster = distributed.LocalCluster(
            n_workers=n, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        )
        self.client = distributed.Client(self.cluster)
        # The futures are kept, because an actor ends with its last future.
        self._futures = [
            self.client.submit(Echo, actor=True, workers=[w.worker_address], pure=False)
            for w in self.cluster.workers.values()
        ]
        self.actors: list[Any] = [f.result() for f in self._futures]
        self.everywhere()
        self.took = time.perf_counter() - begin

    def everywhere(self) -> None:
        for answer in [a.noop("w") for a in self.actors]:
            answer.result()

    def pids(self) -> list[int]:
        return [a.pid().result() for a in self.actors]

    def close(self) -> None:
        self.client.close()
        self.cluster.close()


def spawn_n(n: int) -> None:
    """Start a cluster, once: a second start costs the same."""
    mesh = Mesh(n)
    emit(f"spawn_{n}_s", round(mesh.took, 4))
    emit_memory(f"rss_{n}_mb", mesh.pids())
    latency(f"bcast{n}", mesh.everywhere, 3)
    mesh.close()


def calls() -> None:
    """Measure round trips, fan-out and rates."""
    mesh = Mesh(8)
    actors, one = mesh.actors, mesh.actors[0]
    latency("call1", lambda: one.noop("w").result(), 2)
    latency("bcast8", mesh.everywhere, 2)

    def pipelined() -> None:
        for answer in [one.noop("w") for _ in range(1000)]:
            answer.result()

    def cast() -> None:
        for _ in range(100):
            for a in actors:
                a.noop("w")
        mesh.everywhere()

    rate("pipelined_per_s", pipelined, 1000, 3)
    rate("cast8_per_s", cast, 100, 3)
    times = one.call_peer(actors[1], 600).result()[100:]
    emit("a2a_us", round(percentile(times, 0.5) * 1e6, 1), n=len(times))
    emit("a2a_p99_us", round(percentile(times, 0.99) * 1e6, 1), n=len(times))
    mesh.close()


def rss() -> None:
    """Measure the memory of an idle worker."""
    mesh = Mesh(8)
    pids = mesh.pids()
    emit_memory("rss_idle_mb", pids)
    emit("threads_per_proc", threads(pids))
    emit("import_s", round(IMPORT_S, 3))
    emit_memory("rss_controller_mb", [os.getpid()])
    mesh.close()


def payload() -> None:
    """Measure arrays as argument and as result."""
    mesh = Mesh(1)
    one = mesh.actors[0]
    for size, n in SIZES.items():
        x = np.ones(n, np.uint8)
        bandwidth(f"payload_in_{size}", n, lambda x=x: one.nbytes(x).result(), least=3)
        bandwidth(f"payload_held_{size}", n, lambda n=n: one.held(n).result(), least=3)
        bandwidth(f"payload_out_{size}", n, lambda n=n: one.make(n).result(), least=3)
    mesh.close()


def fail() -> None:
    """SIGKILL one of 8 workers, with a call pending on it and while idle."""
    for kind in ("pending", "idle"):
        mesh = Mesh(8)
        pids = mesh.pids()
        pending = mesh.actors[3].sleep(60) if kind == "pending" else None
        time.sleep(1)  # lets the call reach the worker; nothing reports its arrival
        begin = time.perf_counter()
        os.kill(pids[3], signal.SIGKILL)
        error = "none"
        try:
            if pending:
                pending.result(timeout=50)
            while not pending and time.perf_counter() < begin + 50:
                mesh.actors[3].noop("w").result(timeout=50)
        except Exception as e:
            error = describe(e)
        emit(f"fail_{kind}_s", round(time.perf_counter() - begin, 4), error=error)
        mesh.close()


if __name__ == "__main__":
    version(distributed=distributed.__version__)
    run(
        {
            "spawn8": lambda: spawn_n(8),
            "spawn32": lambda: spawn_n(32),
            "calls": calls,
            "rss": rss,
            "payload": payload,
            "fail": fail,
        }
    )
