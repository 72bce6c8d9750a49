"""Actors of the tests, importable by the scripts that they run."""

from __future__ import annotations

import os
import sys
from typing import Any

from monarch_kernel.actor import Actor, this_host
from monarch_kernel.actor import endpoint as endpoint


class Counter(Actor):
    """Counts, prints, and can be restored."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def __restore__(self, state: int) -> None:
        self.count = state

    @endpoint
    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    @endpoint
    def checkpoint(self) -> int:
        return self.count

    @endpoint
    def say(self, text: str) -> None:
        print(text)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def path(self) -> list[str]:
        return list(sys.path)

    @endpoint
    def fail(self) -> None:
        raise SystemExit("told to")

    @endpoint
    def write(self, path: str, lines: int) -> None:
        """Print much once the file at ``path`` is there."""
        import threading
        import time

        def work() -> None:
            while not os.path.exists(path):
                time.sleep(0.005)
            for number in range(lines):
                print(f"line {number:08}")
            open(path + ".done", "w").close()

        threading.Thread(target=work).start()


class Boss(Actor):
    """Has procs and actors of its own."""

    def __init__(self) -> None:
        self.procs: Any = this_host().spawn_procs(per_host={"gpus": 1}, name="nested")
        self.workers: Any = self.procs.spawn("workers", Counter, 100)

    @endpoint
    def add(self) -> int:
        return int(self.workers.add.call_one().get())

    @endpoint
    def pid(self) -> int:
        return int(self.workers.pid.call_one().get())

    @endpoint
    def hire(self) -> int:
        """Start one more, and ask it."""
        more = this_host().spawn_procs(per_host={"gpus": 1}, name="more").spawn("more", Counter, 200)
        return int(more.add.call_one().get())
