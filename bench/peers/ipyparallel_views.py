"""ipyparallel: an "actor" is an object in an engine's namespace, a call is apply_sync."""

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
    note,
    rate,
    run,
    threads,
    version,
)

_start = time.perf_counter()
import ipyparallel  # noqa: E402 - its import is timed

IMPORT_S = time.perf_counter() - _start


# These functions run in the interactive namespace of the engines, with its globals and imports.
def setup() -> int:
    import os

    import numpy

    class Echo:
        def noop(self, s: str) -> str:
            return s

        def nbytes(self, x: Any) -> int:
            return x.nbytes

        def make(self, n: int) -> Any:
            return numpy.ones(n, numpy.uint8)

        kept: Any = None

        def held(self, n: int) -> Any:
            if self.kept is None or self.kept.nbytes != n:
                self.kept = self.make(n)
            return self.kept

    globals()["actor"] = Echo()
    return os.getpid()


def noop(s: str) -> str:
    return globals()["actor"].noop(s)


def nbytes(x: Any) -> int:
    return globals()["actor"].nbytes(x)


def make(n: int) -> Any:
    return globals()["actor"].make(n)


def held(n: int) -> Any:
    """Return an existing array: the result is moved, not created."""
    return globals()["actor"].held(n)


def sleep(seconds: float) -> None:
    import time

    time.sleep(seconds)


def start(n: int) -> tuple[Any, Any, list[int], float]:
    """Start a cluster with n engines and an object in each; return also the seconds until all have answered first."""
    begin = time.perf_counter()
    cluster = ipyparallel.Cluster(n=n, log_level=40)
    client = cluster.start_and_connect_sync(activate=False)
    pids = client[:].apply_sync(setup)
    return cluster, client, pids, time.perf_counter() - begin


def spawn_n(n: int) -> None:
    """Start a cluster, once: a second start costs the same."""
    cluster, client, pids, took = start(n)
    emit(f"spawn_{n}_s", round(took, 4))
    emit_memory(f"rss_{n}_mb", pids)
    view = client[:]
    latency(f"bcast{n}", lambda: view.apply_sync(noop, "w"), 3)
    cluster.stop_cluster_sync()


def calls() -> None:
    """Measure round trips, fan-out and rates."""
    cluster, client, _, _ = start(8)
    one, view = client[0], client[:]
    latency("call1", lambda: one.apply_sync(noop, "w"), 2)
    latency("bcast8", lambda: view.apply_sync(noop, "w"), 2)

    def pipelined() -> None:
        for future in [one.apply_async(noop, "w") for _ in range(1000)]:
            future.get()

    def cast() -> None:
        for _ in range(100):
            view.apply_async(noop, "w")
        view.apply_sync(noop, "w")

    rate("pipelined_per_s", pipelined, 1000, 3)
    rate("cast8_per_s", cast, 100, 3)
    note("a2a_us", "engines have no handle to each other; a call goes through the client")
    cluster.stop_cluster_sync()


def rss() -> None:
    """Measure the memory of an idle engine."""
    cluster, _, pids, _ = start(8)
    emit_memory("rss_idle_mb", pids)
    emit("threads_per_proc", threads(pids))
    emit("import_s", round(IMPORT_S, 3))
    emit_memory("rss_controller_mb", [os.getpid()])
    cluster.stop_cluster_sync()


def payload() -> None:
    """Measure arrays as argument and as result."""
    cluster, client, _, _ = start(1)
    one = client[0]
    for size, n in SIZES.items():
        x = np.ones(n, np.uint8)
        bandwidth(f"payload_in_{size}", n, lambda x=x: one.apply_sync(nbytes, x), least=3)
        bandwidth(f"payload_held_{size}", n, lambda n=n: one.apply_sync(held, n), least=3)
        bandwidth(f"payload_out_{size}", n, lambda n=n: one.apply_sync(make, n), least=3)
    cluster.stop_cluster_sync()


def fail() -> None:
    """SIGKILL one of 8 engines, with a call pending on it and while idle."""
    for kind in ("pending", "idle"):
        cluster, client, pids, _ = start(8)
        pending = client[3].apply_async(sleep, 60) if kind == "pending" else None
        time.sleep(1)  # lets the call reach the engine; nothing reports its arrival
        begin = time.perf_counter()
        os.kill(pids[3], signal.SIGKILL)
        error = "none"
        try:
            if pending:
                pending.get(timeout=50)
            while not pending and time.perf_counter() < begin + 50:
                client[3].apply_async(noop, "w").get(timeout=50)
        except Exception as e:
            error = describe(e)
        emit(f"fail_{kind}_s", round(time.perf_counter() - begin, 4), error=error)
        cluster.stop_cluster_sync()


if __name__ == "__main__":
    version(ipyparallel=ipyparallel.__version__)
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
