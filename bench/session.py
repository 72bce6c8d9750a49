"""`BenchSession`: one run of a bench, from the description of the machine to the stored figures."""

from __future__ import annotations

import datetime
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.environments import STATE, EnvironmentFailed, python_for
from bench.report import Result
from bench.run import adopt_orphans, end_leftovers


def machine() -> dict[str, object]:
    """Describe the machine of the measurement."""
    model = next(
        (x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x),
        platform.processor(),
    )
    memory = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def progress(text: str) -> None:
    """Print one line that is overwritten on a terminal; print nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


class BenchSession:
    """Rounds in which peers take turns, with each group of each peer in a fresh process.

    A terminated session still ends the processes that it has started.

    Args:
        peers: the peers whose environments are created if they are missing.

    Attributes:
        about: the description of the machine, and later the duration.
        pythons: the interpreter of each peer that could be installed.
        results: all measurements, and notes on failed ones.
    """

    def __init__(self, peers: Sequence[str]) -> None:
        self._began = time.monotonic()
        adopt_orphans()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self.about = machine()
        self.results: list[Result] = []
        self.pythons: dict[str, Path] = {}
        for peer in peers:
            try:
                self.pythons[peer] = python_for(peer)
            except EnvironmentFailed as error:
                self.results.append({"peer": peer, "metric": "group:install", "value": None, "note": str(error)})

    def run(self, rounds: int, order: Sequence[Any], measure: Callable[[Any], list[Result]]) -> None:
        """Measure every item of `order` in each round."""
        try:
            for n in range(rounds):
                for i, item in enumerate(order):
                    progress(f"round {n + 1} of {rounds}, {i + 1} of {len(order)}: {' '.join(map(str, item))}")
                    self.results += [{**r, "round": n} for r in measure(item)]
        finally:
            end_leftovers()
            progress("")
            self.about |= {
                "load_after": round(os.getloadavg()[0], 2),
                "seconds": round(time.monotonic() - self._began),
                "rounds": rounds,
            }

    def keep(self, target: Path | None, name: str = "") -> Path:
        """Write the figures, by default to a file named after ``name`` and the time; return its path."""
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        target = target or STATE / "results" / f"{name}{now}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"machine": self.about, "results": self.results}, indent=1) + "\n")
        return target

    def merge(self, earlier: Sequence[Path]) -> None:
        """Add the figures of earlier runs."""
        for path in earlier:
            self.results += json.loads(path.read_text())["results"]
