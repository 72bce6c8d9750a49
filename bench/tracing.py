"""Costs of a trace for a call: `python -m bench.tracing`; with `--against REF`, costs of the hooks without a trace.

Rounds with the trace on and off alternate in one process. The cost of a call is the processor time of all processes,
which other work on the machine hardly affects. The minimum of all rounds is reported, with the elapsed time beside it.
With `--against`, two checkouts alternate instead, each in separate processes without a trace: this one, and another one
named by a git reference.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.measure import cpu_seconds

ROOT = Path(__file__).resolve().parent.parent


def round_of(call: Any, count: int) -> tuple[float, float]:
    """Measure the microseconds of one call: processor time, and elapsed time."""
    spent = cpu_seconds()
    start = time.perf_counter_ns()
    for _ in range(count):
        call()
    passed = time.perf_counter_ns() - start
    return (cpu_seconds() - spent) / count * 1e6, passed / count / 1000


def workers(ranks: int) -> Any:
    """Spawn actors that do nothing."""
    from bench.tracing_actor import Idle
    from monarch_kernel.actor import this_host

    mesh = this_host().spawn_procs(per_host={"gpus": ranks}).spawn("idle", Idle)
    for _ in range(500):
        mesh.nothing.call().get()
    return mesh


def paired(ranks: int, rounds: int, count: int) -> dict[str, float]:
    """Measure calls with the trace on and off, in turn."""
    from monarch_kernel.watch import trace

    mesh = workers(ranks)
    one = mesh if ranks == 1 else None
    call = (lambda: one.nothing.call_one().get()) if one is not None else (lambda: mesh.nothing.call().get())
    off: list[tuple[float, float]] = []
    on: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            off.append(round_of(call, count))
            with trace(Path(folder) / "run.json"):
                on.append(round_of(call, count))
    (off_cpu, off_clock), (on_cpu, on_clock) = (tuple(map(min, zip(*each, strict=True))) for each in (off, on))
    return {
        "ranks": ranks,
        "off_cpu_us": round(off_cpu, 1),
        "on_cpu_us": round(on_cpu, 1),
        "extra_cpu_us": round(on_cpu - off_cpu, 2),
        "extra_cpu_per_rank_us": round((on_cpu - off_cpu) / ranks, 2),
        "off_us": round(off_clock, 1),
        "on_us": round(on_clock, 1),
    }


def plain(count: int) -> float:
    """Measure the processor time of a call without a trace (microseconds); the minimum of several rounds."""
    mesh = workers(1)
    return min(round_of(lambda: mesh.nothing.call_one().get(), count)[0] for _ in range(10))


def against(reference: str, rounds: int) -> dict[str, float]:
    """Measure calls without a trace here and in another version, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", folder + "/other", reference], cwd=ROOT, check=True
        )
        try:
            # Both use this version of the measurement, because the other version may not have it.
            tools = Path(folder) / "tools"
            tools.mkdir()
            (tools / "bench").symlink_to(ROOT / "bench")
            figures: dict[str, list[float]] = {"here": [], "there": []}
            for _ in range(rounds):
                for name, root in (("here", ROOT), ("there", Path(folder) / "other")):
                    env = {**os.environ, "PYTHONPATH": f"{tools}{os.pathsep}{root}"}
                    ran = subprocess.run(
                        [sys.executable, "-m", "bench.tracing", "--plain"],
                        cwd=folder,
                        env=env,
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                    figures[name].append(float(ran.stdout))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder + "/other"], cwd=ROOT, check=True)
    ratios = [here / there for here, there in zip(figures["here"], figures["there"], strict=True)]
    return {
        "here_us": round(statistics.median(figures["here"]), 2),
        "there_us": round(statistics.median(figures["there"]), 2),
        "ratio": round(statistics.median(ratios), 4),
    }


def main() -> None:
    """Measure, and print a JSON line for each figure."""
    parser = argparse.ArgumentParser(prog="python -m bench.tracing", description="What a trace costs a call.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--count", type=int, default=500, help="calls in a round")
    parser.add_argument("--against", metavar="REF", help="the cost of the hooks while no trace is on")
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    found = parser.parse_args()
    if found.plain:
        print(plain(found.count))
    elif found.against:
        print(json.dumps(against(found.against, found.rounds)), flush=True)
    else:
        for ranks in (1, 8):
            print(json.dumps({**paired(ranks, found.rounds, found.count), "load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main()
