"""Actors that tests put on workers. A module of its own, without pytest: every rank imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np

from monarch_kernel.actor import Actor, Channel, endpoint


class Remote(Actor):
    """Talks to others, wherever they are, and has procs of its own."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def say(self, text: str) -> None:
        print(text, flush=True)

    @endpoint
    def total(self, values: Any) -> float:
        return float(values.sum())

    @endpoint
    def double(self, values: Any) -> Any:
        return values * 2

    @endpoint
    def ask(self, other: Any, value: Any) -> Any:
        """What another actor makes of it."""
        return other.double.call_one(value).get()

    @endpoint
    def feed(self, port: Any, count: int) -> None:
        """Send a port what numbers there are."""
        for number in range(count):
            port.send(number)

    @endpoint
    def open(self) -> Any:
        """A port whose receiver is here."""
        port, self.receiver = Channel.open()
        return port

    @endpoint
    def received(self, count: int) -> list[Any]:
        return [self.receiver.recv().get() for _ in range(count)]

    @endpoint
    def spawn_on(self, hosts: Any, count: int) -> Any:
        """Procs of this rank's own on other hosts, with actors."""
        self.procs = hosts.spawn_procs(per_host={"own": count})
        return self.procs.spawn("own", Remote)

    @endpoint
    def leave_behind(self) -> int:
        """A subprocess in a session of its own, which does not end by itself."""
        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        return subprocess.Popen(command, start_new_session=True).pid

    @endpoint
    def surroundings(self) -> tuple[str, dict[str, str], list[str]]:
        return os.getcwd(), dict(os.environ), list(sys.path)

    @endpoint
    def stop_hosts(self, hosts: Any, how: str) -> str:
        """Try what only the controller may do."""
        try:
            getattr(hosts, how)().get()
        except RuntimeError as e:
            return str(e)
        return ""

    @endpoint
    def attach(self, url: str) -> str:
        from monarch_kernel.actor import attach_to_workers

        try:
            attach_to_workers(workers=[url])
        except RuntimeError as e:
            return str(e)
        return ""


class Holder(Actor):
    """Has memory that others read and write."""

    def __init__(self, size: int) -> None:
        self.values = np.zeros(size)

    @endpoint
    def handle(self) -> Any:
        from monarch_kernel.rdma import RDMABuffer

        return RDMABuffer(self.values)

    @endpoint
    def sum(self) -> float:
        return float(self.values.sum())


class Reader(Actor):
    """Reads and writes the memory of others."""

    @endpoint
    def add_one(self, handle: Any, size: int) -> float:
        """Read it, add one to each value, write it back; the sum of what was read."""
        values = np.empty(size)
        handle.read_into(values).get(60)
        before = float(values.sum())
        values += 1
        handle.write_from(values).get(60)
        return before
