"""Calls and arrays between hosts: two workers on this machine, over TCP and loopback.

``python -m bench.hosts`` prints the median and the best of each. It uses the public API and the commands only, so that
two versions can be compared: run it with ``PYTHONPATH`` set to one and to the other, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from monarch_kernel.actor import Actor, attach_to_workers, endpoint, shutdown_context

#: The payloads of a round trip, and the number of repetitions.
SMALL, LARGE = 64, 64 << 20


class Peer(Actor):
    """Returns its argument."""

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def ask(self, other: Any, size: int, times: int) -> list[float]:
        """Call another actor this often; return the seconds of each call."""
        import numpy as np

        value: Any = b"x" * size if size < 1 << 16 else np.ones(size, np.uint8)
        return list(_times(lambda: other.echo.call_one(value).get(60), times))


def _times(ask: Callable[[], Any], times: int) -> Iterator[float]:
    for _ in range(times):
        began = time.perf_counter()
        ask()
        yield time.perf_counter() - began


@contextmanager
def worker(key: Path, log: Any) -> Generator[str]:
    """Start a worker on this machine; yield its URL."""
    command = [
        sys.executable,
        "-m",
        "monarch_kernel",
        "worker",
        "--listen",
        "tcp://127.0.0.1:0",
        "--key-file",
        str(key),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def measure(times: int) -> dict[str, list[float]]:
    """Measure the seconds of each call, by payload and path."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as workers:
        key = Path(folder, "key")
        subprocess.run(
            [sys.executable, "-m", "monarch_kernel", "keys", str(key)], check=True, stdout=subprocess.DEVNULL
        )
        log = workers.enter_context(Path(folder, "log").open("w"))
        urls = [workers.enter_context(worker(key, log)) for _ in range(2)]
        hosts: Any = attach_to_workers(workers=urls, key_file=str(key))
        peers: Any = hosts.spawn_procs().spawn("peer", Peer)
        one, other = peers.slice(hosts=0), peers.slice(hosts=1)
        one.echo.call_one(1).get(60)
        other.ask.call_one(one, SMALL, 100).get(60)
        found = {"controller to rank, 64 B": list(_times(lambda: one.echo.call_one(b"x" * SMALL).get(60), times))}
        found["rank to rank, 64 B"] = other.ask.call_one(one, SMALL, times).get(60)
        found["rank to rank, 64 MiB"] = other.ask.call_one(one, LARGE, max(3, times // 200)).get(120)
        hosts.stop().get(60)
        shutdown_context().get(60)
        return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.hosts", description=__doc__)
    parser.add_argument("--times", type=int, default=1000, help="how often each small call is made (default: 1000)")
    for what, seconds in measure(parser.parse_args().times).items():
        print(f"{what}: {statistics.median(seconds) * 1e6:,.0f} µs median, {min(seconds) * 1e6:,.0f} µs best")


if __name__ == "__main__":
    main()
