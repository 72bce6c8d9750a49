"""Ray: one actor per worker process, on a local cluster without a dashboard."""

# The peer is installed in a separate environment, which no checker sees.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import numpy as np

from bench.measure import (
    QUICK,
    SIZES,
    bandwidth,
    describe,
    emit,
    emit_memory,
    latency,
    percentile,
    rate,
    run,
    sample,
    threads,
    version,
)

_start = time.perf_counter()
import ray  # noqa: E402 - its import is timed

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

    def call_peer(self, other: Any, n: int) -> list[float]:
        return sample(lambda: ray.get(other.noop.remote("w")), 0, n, n, warm=100)


# Any: the decorator turns the class into handles whose methods have .remote().
Worker: Any = ray.remote(num_cpus=0)(Echo)


def start() -> float:
    """Start the local cluster; return the seconds."""
    begin = time.perf_counter()
    ray.init(
        num_cpus=40,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=(1 if QUICK else 4) << 30,
    )
    return time.perf_counter() - begin


def everywhere(actors: list[Any]) -> Any:
    return ray.get([a.noop.remote("w") for a in actors])


def spawn_n(n: int) -> None:
    """Spawn twice; the first includes the start of the cluster, as the first mesh of a controller does."""
    init = start()
    for tag in ("", "_again"):
        begin = time.perf_counter()
        actors = [Worker.remote() for _ in range(n)]
        everywhere(actors)
        took = time.perf_counter() - begin
        emit(f"spawn_{n}{tag}_s", round(took if tag else took + init, 4), without_init=round(took, 4))
        if tag:
            emit_memory(f"rss_{n}_mb", ray.get([a.pid.remote() for a in actors]))
            latency(f"bcast{n}", lambda actors=actors: everywhere(actors), 3)
        for a in actors:
            ray.kill(a)


def calls() -> None:
    """Measure round trips, fan-out and rates."""
    start()
    actors = [Worker.remote() for _ in range(8)]
    everywhere(actors)
    one = actors[0]
    latency("call1", lambda: ray.get(one.noop.remote("w")), 2)
    latency("bcast8", lambda: everywhere(actors), 2)
    rate("pipelined_per_s", lambda: ray.get([one.noop.remote("w") for _ in range(1000)]), 1000)

    def cast() -> None:
        for _ in range(1000):
            for a in actors:
                a.noop.remote("w")
        everywhere(actors)

    rate("cast8_per_s", cast, 1000, 3)
    times = ray.get(one.call_peer.remote(actors[1], 1000))
    emit("a2a_us", round(percentile(times, 0.5) * 1e6, 1), n=len(times))
    emit("a2a_p99_us", round(percentile(times, 0.99) * 1e6, 1), n=len(times))


def rss() -> None:
    """Measure the memory of an idle worker."""
    start()
    actors = [Worker.remote() for _ in range(8)]
    pids = ray.get([a.pid.remote() for a in actors])
    emit_memory("rss_idle_mb", pids)
    emit("threads_per_proc", threads(pids))
    emit("import_s", round(IMPORT_S, 3))
    emit_memory("rss_controller_mb", [os.getpid()])


def payload() -> None:
    """Measure arrays as argument and as result."""
    start()
    one = Worker.remote()
    for size, n in SIZES.items():
        x = np.ones(n, np.uint8)
        bandwidth(f"payload_in_{size}", n, lambda x=x: ray.get(one.nbytes.remote(x)))
        bandwidth(f"payload_held_{size}", n, lambda n=n: ray.get(one.held.remote(n)))
        bandwidth(f"payload_out_{size}", n, lambda n=n: ray.get(one.make.remote(n)))


def fail() -> None:
    """SIGKILL one of 8 workers, with a call pending on it and while idle."""
    start()
    for kind in ("pending", "idle"):
        actors = [Worker.remote() for _ in range(8)]
        pids = ray.get([a.pid.remote() for a in actors])
        pending = [a.sleep.remote(60) for a in actors] if kind == "pending" else None
        time.sleep(1)  # lets the calls reach the workers; nothing reports their arrival
        begin = time.perf_counter()
        os.kill(pids[3], signal.SIGKILL)
        error = "none"
        try:
            if pending:
                ray.wait(pending, num_returns=1, timeout=120)
                ray.get(pending[3], timeout=120)
            while not pending and time.perf_counter() < begin + 120:
                ray.get(actors[3].noop.remote("w"), timeout=120)
        except Exception as e:
            error = describe(e)
        emit(f"fail_{kind}_s", round(time.perf_counter() - begin, 4), error=error)


if __name__ == "__main__":
    version(ray=ray.__version__)
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
