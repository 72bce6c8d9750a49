"""Attacks on one real worker while a controller works on it; what they cost the worker, and what noticed them."""

from __future__ import annotations

import os
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from monarch_kernel.actor import Actor, ActorError, SupervisionError, endpoint
from monarch_kernel.protocol.keys import Keys, load_keys
from tests.attacks import GIANT_HELLO, ZMTP_CURVE, ZMTP_NULL, hang_up_of, record, wrong_hello
from tests.attacks.holder import Holder, hello, junk, random_header, typed
from tests.workers import PATIENCE, Team, Worker

#: How many connections one kind of attack has at a time.
_AT_ONCE = 24
#: How often a call is made, and a new link with the key (seconds).
_PULSE = 0.1


class Echo(Actor):
    """The legitimate work."""

    @endpoint
    def echo(self, value: int) -> int:
        return value


@dataclass
class Report:
    """What came of it.

    Attributes:
        attempts: by kind of attack.
        calls, slowest: legitimate calls, and the slowest (seconds).
        arrivals, latest: new links with the key, and the one that took longest until it was greeted (seconds).
        repeated: those that made room for others first, and tried again, as ``dial`` does.
        failures: of both.
        memory, descriptors: of the worker, at their most (bytes, number).
        logged: by the worker of strangers (bytes).
    """

    attempts: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    slowest: float = 0.0
    arrivals: int = 0
    latest: float = 0.0
    repeated: int = 0
    failures: list[str] = field(default_factory=list)
    memory: int = 0
    descriptors: int = 0
    logged: int = 0

    def __str__(self) -> str:
        attempts = ", ".join(f"{count:,} {kind}" for kind, count in self.attempts.items())
        return (
            f"attempts: {attempts}\n"
            f"calls: {self.calls:,}, the slowest took {self.slowest * 1000:,.0f} ms\n"
            f"new links with the key: {self.arrivals:,}, {self.repeated} at another attempt, the slowest took "
            f"{self.latest * 1000:,.0f} ms\n"
            f"failures of these: {len(self.failures)} {self.failures[:5]}\n"
            f"the worker: {self.memory / 1e6:,.0f} MB and {self.descriptors:,} descriptors at most, "
            f"{self.logged:,} bytes of log about strangers"
        )


# -- attacks ----------------------------------------------------------------------------------------


def _say(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock:
        try:
            sock.sendall(data)
            hang_up_of(sock)
        except OSError:
            pass  # it has hung up already


def _noise(chance: random.Random) -> bytes:
    return chance.choice(
        [b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(300), record(22, chance.randbytes(200)), b"\0" * 100]
    )


def _giant(chance: random.Random) -> bytes:
    return chance.choice([GIANT_HELLO, record(22, chance.randbytes(2000), 0xFFFF), record(22, b"\x01" + b"\xff" * 60)])


STRANGERS: dict[str, Callable[[random.Random], bytes]] = {
    "garbage": _noise,
    "null mechanism": lambda chance: chance.choice([ZMTP_NULL, ZMTP_CURVE]),
    "giant lengths": _giant,
    "wrong hello": lambda _chance: wrong_hello(),
}

HOLDERS: dict[str, Callable[[random.Random], bytes]] = {
    "random headers": random_header,
    "junk": junk,
    "typed": lambda chance: b"".join(typed(chance) for _ in range(8)),
}


def _hold(port: int, keys: Keys, make: Callable[[random.Random], bytes], seed: int) -> None:
    chance = random.Random(seed)
    with suppress(OSError, EOFError), Holder(port, keys, PATIENCE) as holder:
        holder.send(hello(f"attacker-{seed}") + make(chance))
        holder.sock.settimeout(0.2)
        holder.sock.recv(100)


def silent(port: int, count: int) -> list[socket.socket]:
    """So many connections that say nothing; half of them begin a hello."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + 1000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 1000), hard))
    made: list[socket.socket] = []
    for k in range(count):
        made.append(socket.create_connection(("127.0.0.1", port), PATIENCE))
        if k % 2:
            try:
                made[-1].send(b"\x16\x03\x01")
            except OSError:
                pass
    return made


# -- meanwhile --------------------------------------------------------------------------------------


class _Witness:
    """Calls, and connects with the key, again and again."""

    def __init__(self, team: Team, worker: Worker, keys: Keys, port: int, report: Report) -> None:
        self._report = report
        self._worker = worker
        self._keys = keys
        self._port = port
        self._over = threading.Event()
        self._echo = team.attach(timeout=PATIENCE).spawn_procs().spawn("echo", Echo)
        self._echo.echo.call_one(0).get(PATIENCE)
        self._threads = [threading.Thread(target=work) for work in (self._call, self._arrive, self._weigh)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        report = self._report
        while not self._over.wait(_PULSE):
            began = time.monotonic()
            try:
                assert self._echo.echo.call_one(report.calls).get(PATIENCE) == report.calls
            except (ActorError, SupervisionError, TimeoutError) as e:
                report.failures.append(f"a call: {e}")
                return
            report.calls += 1
            report.slowest = max(report.slowest, time.monotonic() - began)

    def _arrive(self) -> None:
        report = self._report
        while not self._over.wait(_PULSE):
            began = time.monotonic()
            for attempt in range(4):
                try:
                    Holder(self._port, self._keys, PATIENCE).close()
                except (OSError, EOFError) as e:
                    why = repr(e)
                else:
                    report.arrivals += 1
                    report.repeated += attempt > 0
                    break
            else:
                report.failures.append(f"a new link: {why}")
            report.latest = max(report.latest, time.monotonic() - began)

    def _weigh(self) -> None:
        while not self._over.wait(_PULSE):
            with open(f"/proc/{self._worker.pid}/status") as file:
                peak = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
            self._report.memory = max(self._report.memory, peak * 1024)
            self._report.descriptors = max(self._report.descriptors, len(os.listdir(f"/proc/{self._worker.pid}/fd")))


def storm(team: Team, counts: dict[str, int], say: Callable[[str], None] = lambda _line: None) -> Report:
    """Attack the team's first worker, each kind of attack so many times."""
    worker = team[0]
    assert team.key_file is not None
    keys = load_keys(team.key_file)
    port = int(worker.url.rsplit(":", 1)[1])
    report = Report()
    witness = _Witness(team, worker, keys, port, report)
    try:
        for kind, count in counts.items():
            began = time.monotonic()
            if kind == "silent":
                for sock in silent(port, count):
                    sock.close()
            else:
                _repeat(kind, count, port, keys)
            report.attempts[kind] = count
            say(f"{count:,} {kind}: {time.monotonic() - began:.1f} s, {report.memory / 1e6:,.0f} MB")
            if worker.process.poll() is not None:
                report.failures.append(f"the worker has ended after {kind}:\n{worker.log()[-3000:]}")
                break
    finally:
        witness.end()
    report.logged = sum(len(line) for line in worker.log().splitlines() if " refused - - " in line)
    return report


def _repeat(kind: str, count: int, port: int, keys: Keys) -> None:
    seed = int.from_bytes(os.urandom(4), "big")

    def strange(numbers: Iterable[int]) -> None:
        for number in numbers:
            _say(port, STRANGERS[kind](random.Random(seed + number)))

    def hold(numbers: Iterable[int]) -> None:
        for number in numbers:
            _hold(port, keys, HOLDERS[kind], seed + number)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        work = strange if kind in STRANGERS else hold
        for done in [pool.submit(work, range(start, count, _AT_ONCE)) for start in range(_AT_ONCE)]:
            done.result()
