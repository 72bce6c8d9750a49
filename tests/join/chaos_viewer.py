"""A viewer that does random things to a job, without changing its values: ``chaos_viewer.py JOB SEED``.

It tells each action that it begins, one a line, on standard output, and does them until its standard input ends.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from monarch_kernel.debug import DriverError, diff, get_debugger, hang, stacks
from monarch_kernel.engines import tool_runtime
from monarch_kernel.engines.join.announcements import JoinError
from monarch_kernel.errors import ActorError, SupervisionError
from monarch_kernel.kernel.cell import Cell
from monarch_kernel.kernel.rank.executor import CellExecutor

TRAIN = Path(__file__).with_name("chaos_train.py")
LINES = [at for at, line in enumerate(TRAIN.read_text().split("\n"), 1) if line.startswith("    ") and " = " in line]
#: What may go wrong by the nature of chaos: others take control, ranks are late, stops are over.
EXPECTED = (DriverError, JoinError, LookupError, TimeoutError, RuntimeError, ValueError, ActorError, SupervisionError)


class Viewer:
    """One viewer.

    Args:
        job: the name of the job.
        chance: decides what it does.
    """

    def __init__(self, job: str, chance: random.Random) -> None:
        self.job = job
        self.chance = chance
        self.procs: Any = None
        self.cells: Any = None

    def act(self) -> str:
        """Do one thing; returns what."""
        if self.procs is None or getattr(self.procs, "_stopped", False):
            return self.join()
        actions: list[tuple[int, Callable[[], None]]] = [
            (4, self.look),
            (8, self.stop),
            (8, self.step),
            (8, self.evaluate),
            (6, self.go_on),
            (3, self.clear),
            (3, self.pause),
            (3, self.cell),
            (1, self.take),
            (1, self.cut),
            (1, self.leave),
        ]
        action = self.chance.choices([each for _, each in actions], [weight for weight, _ in actions])[0]
        action()
        return action.__name__

    def join(self) -> str:
        """Join, as a driver or not."""
        hold = 1.0 if self.chance.random() < 0.1 else 0.0
        self.procs = tool_runtime().joined_jobs().join(self.job, drive=self.chance.random() < 0.3, hold=hold)
        self.cells = None
        get_debugger().watch(self.procs)
        return "join"

    def look(self) -> None:
        """Ask for stacks, for the difference of a value, or why nothing moves."""
        self.chance.choice(
            [
                lambda: stacks(self.procs, timeout=0.5),
                lambda: diff(self.procs, "model", timeout=0.5),
                lambda: hang(self.procs, timeout=0.5),
            ]
        )()

    def stop(self) -> None:
        """Set a breakpoint of any kind, and wait for stops."""
        kind: dict[str, Any] = self.chance.choice(
            [
                {},
                {"condition": "number % 3 == 1"},
                {"differs": "number"},
                {"first": True},
                {"hits": 2},
                {"log": "{number}"},
            ]
        )
        if "log" in kind:
            kind = {"condition": "1 / 0"}
        get_debugger().break_at(str(TRAIN), self.chance.choice(LINES), mesh=self.procs, **kind)
        get_debugger().wait(bool, self.chance.uniform(0.0, 0.4))

    def step(self) -> None:
        """Step what is stopped."""
        stops = get_debugger().select(self.procs)
        if stops:
            self.chance.choice([stops.next, stops.step, stops.out])(patience=0.3)

    def evaluate(self) -> None:
        """Look at values in stops; sometimes for longer than it is allowed to take."""
        debugger = get_debugger()
        if self.chance.random() < 0.1:
            debugger.evaluate(debugger.stops(), "while True: pass", timeout=0.2)
        else:
            debugger.evaluate(
                debugger.stops(), self.chance.choice(["locals().keys()", "number", "nothing", "1 / 0"]), timeout=0.5
            )

    def go_on(self) -> None:
        """Let all continue."""
        get_debugger().resume(get_debugger().stops())

    def clear(self) -> None:
        """Remove all breakpoints."""
        get_debugger().clear()

    def pause(self) -> None:
        """Stop ranks where they are."""
        get_debugger().pause(self.procs)
        get_debugger().wait(bool, 0.2)

    def cell(self) -> None:
        """Run a cell, which prints, or goes on for longer than this viewer lives."""
        if self.cells is None:
            self.cells = self.procs.spawn("cells", CellExecutor)
        source = self.chance.choice(["print('hello'); done", "import time\nwhile True: time.sleep(0.01)", "1 / 0"])
        number = str(self.chance.random())
        try:
            self.cells.run.call(Cell(number, source, f"<{number}>", source)).get(0.5)
        except TimeoutError:
            self.procs.interrupt().get(2.0)

    def take(self) -> None:
        """Take control."""
        tool_runtime().joined_jobs().drive(self.procs)

    def cut(self) -> None:
        """Lose the network to a rank."""
        links = list(tool_runtime().joined_jobs()._jobs[self.procs._mesh_uid].carrier.links.values())
        if links:
            self.chance.choice(links)._sock.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Let go."""
        tool_runtime().joined_jobs().leave(self.procs)
        self.procs = None


def main() -> None:
    """Act until standard input ends."""
    chance = random.Random(int(sys.argv[2]))
    viewer = Viewer(sys.argv[1], chance)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while not over.is_set():
        began = time.monotonic()
        try:
            did = viewer.act()
        except EXPECTED as error:
            did = f"failed {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(f"{did} {time.monotonic() - began:.2f}", flush=True)
        over.wait(chance.expovariate(50.0))


if __name__ == "__main__":
    main()
