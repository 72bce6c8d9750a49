"""Hosts by ssh from a real sshd of this machine: ``python -m bench.launch.ssh GROUP``.

``ssh8``, ``ssh64``: from ``SSHJob(...)`` until 8 or 64 workers are attached; the limit is ``ssh HOST true`` to as many
hosts, with as many parallel connections. Both are measured with OpenSSH's default key exchange, and with ``CLASSICAL``:
the post-quantum default takes a client most of the time of a login. Logins have an empty home, so that the startup of
this machine's shell is not measured. ``message``: 64 MB from a rank of one host to a rank of another, until it has
answered; the limit is the time for the same amount over an open ssh connection, until the other side has answered.
"""

from __future__ import annotations

import functools
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bench.launch.hosts import PATIENCE, engine, first_answer
from bench.launch.rows import LIMIT
from bench.measure import PEER, QUICK, bandwidth, emit, percentile, run, sample, version
from monarch_kernel._version import __version__
from monarch_kernel.actor import Actor, endpoint, shutdown_context
from monarch_kernel.job import SSHJob
from monarch_kernel.launchers.ssh import PARALLEL
from tests.launchers.sshd import Sshd, running

REPEATS = 1 if QUICK else 3
#: Options of ssh, by the names of metrics.
CLASSICAL = ["-o", "KexAlgorithms=^curve25519-sha256"]
EXCHANGES = {"": [], "_classical": CLASSICAL}
#: The size of a message (bytes).
SIZE = 64_000_000


def logins(daemon: Sshd, count: int) -> None:
    """Measure the limit: a command that does nothing on each host."""

    def login(options: list[str], number: int) -> None:
        command = [*daemon.command, *options, "-T", f"node{number}", "true"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=PATIENCE)

    times: dict[str, list[float]] = {name: [] for name in EXCHANGES}
    for _ in range(REPEATS):
        for name, options in EXCHANGES.items():
            began = time.perf_counter()
            with ThreadPoolExecutor(PARALLEL) as pool:
                list(pool.map(functools.partial(login, options), range(count)))
            times[name].append(time.perf_counter() - began)
    for name, taken in times.items():
        emit(f"ssh{count}{name}_s", round(percentile(taken, 0.5), 3), n=REPEATS)


def start(daemon: Sshd, count: int) -> None:
    """Start a worker on each host, and a rank on each worker."""
    attached: dict[str, list[float]] = {name: [] for name in EXCHANGES}
    answered: dict[str, list[float]] = {name: [] for name in EXCHANGES}
    for _ in range(REPEATS):
        for name, options in EXCHANGES.items():
            began = time.perf_counter()
            job = SSHJob([f"node{number}" for number in range(count)], ssh=[*daemon.command, *options], idle=120)
            hosts = job.state(cached_path=None).hosts
            attached[name].append(time.perf_counter() - began)
            first_answer(hosts)
            answered[name].append(time.perf_counter() - began)
            job.kill()
    for name, taken in attached.items():
        emit(f"ssh{count}{name}_s", round(percentile(taken, 0.5), 3), n=REPEATS, most=round(max(taken), 3))
        emit(f"ssh{count}{name}_answer_s", round(percentile(answered[name], 0.5), 3), n=REPEATS)


class Peer(Actor):
    """One of two ends of messages."""

    @endpoint
    def take(self, value: Any) -> int:
        return value.nbytes

    @endpoint
    def send(self, other: Any) -> list[float]:
        """Send messages to another end; return the seconds of each."""
        value = np.ones(SIZE, np.uint8)

        def once() -> None:
            if other.take.call_one(value).get(PATIENCE) != SIZE:
                raise AssertionError("a part of the message is missing")

        return sample(once, 3.0, 5, 200, warm=3)


def message(daemon: Sshd) -> None:
    """Measure messages from rank to rank."""
    job = SSHJob(["node0", "node1"], ssh=daemon.command, idle=120)
    peers: Any = job.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1}).spawn("peer", Peer)
    times = peers.slice(hosts=0).send.call_one(peers.slice(hosts=1)).get(PATIENCE)
    taken = percentile(times, 0.5)
    emit("message_GBps", round(SIZE / taken / 1e9, 3), n=len(times), best=round(SIZE / min(times) / 1e9, 3))
    job.kill()


def piped(daemon: Sshd) -> None:
    """Measure the limit: the same bytes through ``cat`` at the other end of one connection."""
    remote = f"while head -c {SIZE} | cat >/dev/null; do echo; done"
    value = bytes(SIZE)
    process = subprocess.Popen([*daemon.command, "-T", "node0", remote], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None

    def once(stdin: Any = process.stdin, stdout: Any = process.stdout) -> None:
        stdin.write(value)
        stdin.flush()
        if stdout.read(1) != b"\n":
            raise RuntimeError("the connection has ended")

    try:
        bandwidth("message", SIZE, once)
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """Run the group named on the command line."""
    with engine(running) as daemon:
        work, between = (logins, piped) if PEER == LIMIT else (start, message)
        if PEER == LIMIT:
            said = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr.strip()
            version(ssh=said.partition(",")[0])
        else:
            version(monarch_kernel=__version__)
        starts = {f"ssh{count}": functools.partial(work, daemon, count) for count in (8, 64)}
        run({**starts, "message": lambda: between(daemon)})
        if PEER != LIMIT:
            shutdown_context().get(PATIENCE)


if __name__ == "__main__":
    main()
