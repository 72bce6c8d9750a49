"""``python -m bench.join cost|join``: what prepared ranks cost until somebody joins, and how long joining takes.

``cost``: a loop of training steps in two processes that take turns, one of them prepared: its steps, its memory, its
threads, and the modules that preparing has loaded; and what the line of ``monarch-kernel join install`` costs another
Python. ``join``: from the call until all ranks have let the tools in, of ranks in processes of their own, which load
the tools then, and again when they have them; and of simulated ones (``ranks``). Ranks let a viewer in before they have
loaded the tools, so the first answer of these is a figure of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import site
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.environments import ROOT
from monarch_kernel.engines.join.install import NAME, line

#: The largest allowed values (seconds, MB, percent, microseconds).
BARS = {
    "join 8 ranks, s": 0.5,
    "join 1000 simulated ranks, s": 3.0,
    "memory, MB": 5.0,
    "steps, %": 0.5,
    "line of install, µs": 100.0,
}
#: Modules that must not be loaded before a join.
HEAVY = ("monarch_kernel.debugger", "msgspec", "zmq", "cloudpickle", "numpy", "torch", "IPython")
ROUNDS, STEPS = 40, 150
PATIENCE = 60.0

_STEP = """
import json, os, sys, threading, time
if sys.argv[1] == "prepared":
    import monarch_kernel.join
loaded = sorted(sys.modules)
def resident():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("Private_", "Anonymous"))) / 2 / 1024
print(json.dumps({"memory": resident(), "threads": threading.active_count(), "modules": loaded}), flush=True)
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch = torch.randn(64, 256)
for line in sys.stdin:
    began = time.process_time()
    for _ in range(int(line)):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    print(time.process_time() - began, flush=True)
"""
_SLEEP = "import sys; sys.stdin.read()"


def environment(name: str = "") -> dict[str, str]:
    """Return the environment of the measured processes."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MONARCH_KERNEL_")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **({"MONARCH_KERNEL_JOIN": name} if name else {})}


@contextmanager
def processes(commands: list[list[str]], environ: dict[str, str]) -> Generator[list[subprocess.Popen[str]]]:
    """Start processes that end when their input ends."""
    started: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            started.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
            )
        yield started
    finally:
        for process in started:
            assert process.stdin is not None
            process.stdin.close()
        for process in started:
            process.wait(PATIENCE)


def say(process: subprocess.Popen[str], text: str = "") -> str:
    """Send a line to a process, if given; return the line that it answers."""
    assert process.stdin is not None and process.stdout is not None
    if text:
        process.stdin.write(text + "\n")
        process.stdin.flush()
    return process.stdout.readline()


def cost() -> dict[str, float]:
    """Measure a prepared and an unprepared process side by side; steps in processor time, in turn."""
    commands = [[sys.executable, "-c", _STEP, kind] for kind in ("prepared", "plain")]
    with processes(commands, environment("bench-cost")) as pair:
        prepared, plain = (json.loads(say(each)) for each in pair)
        loaded: set[str] = set(prepared["modules"])
        heavy = [name for name in HEAVY if any(each == name or each.startswith(f"{name}.") for each in loaded)]
        if heavy:
            raise SystemExit(f"preparing a rank has loaded {', '.join(heavy)}")
        for each in pair:
            say(each, str(STEPS))
        ratios: list[float] = []
        for turn in range(ROUNDS):
            order = pair if turn % 2 else pair[::-1]
            times = {each.pid: float(say(each, str(STEPS))) for each in order}
            ratios.append(times[pair[0].pid] / times[pair[1].pid])
    return {
        "memory, MB": prepared["memory"] - plain["memory"],
        "threads": prepared["threads"] - plain["threads"],
        "modules loaded": len(loaded) - len(plain["modules"]),
        "steps, %": 100 * (statistics.median(ratios) - 1),
        "line of install, µs": line_cost(),
    }


def line_cost() -> float:
    """Measure the line in site-packages if the variable is not set, in processor time (microseconds)."""
    before = os.environ.pop("MONARCH_KERNEL_JOIN", None)
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as full:
        Path(full, NAME).write_text(line(), "utf-8")
        least = {empty: 1e9, full: 1e9}
        for _ in range(2000):
            for folder in least:
                began = time.process_time()
                site.addsitedir(folder, set())
                least[folder] = min(least[folder], time.process_time() - began)
                sys.path.remove(folder)
    if before is not None:
        os.environ["MONARCH_KERNEL_JOIN"] = before
    return 1e6 * (least[full] - least[empty])


def join_real(count: int) -> dict[str, float]:
    """Measure joins of ranks in separate processes."""
    name = f"bench-{os.getpid()}"
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "rank.py")
        script.write_text(_SLEEP)
        with processes([[sys.executable, "-m", "monarch_kernel.join", str(script)]] * count, environment(name)):
            found |= joined(name, count, f"join {count} ranks")
            found |= joined(name, count, f"join {count} ranks again")
    return found


def join_simulated(count: int, at_once: int = 4) -> dict[str, float]:
    """Measure joins of ranks that share processes; a viewer has loaded the tools before."""
    name, each = f"bench-{os.getpid()}", count // at_once
    command = [sys.executable, "-m", "bench.join.ranks", name]
    commands = [[*command, str(each * at), str(each), str(count)] for at in range(at_once)]
    with processes(commands, environment()) as started:
        for process in started:
            assert say(process) == "ready\n"
        return joined(name, count, f"join {count} simulated ranks")


def joined(name: str, count: int, what: str) -> dict[str, float]:
    """Measure a join, and the time until the tools have answered for the first time (seconds)."""
    from monarch_kernel.engines import tool_runtime

    jobs: Any = tool_runtime().joined_jobs()
    end = time.monotonic() + PATIENCE
    while sum(len(job.ranks) for job in jobs.joinable() if job.name == name) < count:
        if time.monotonic() > end:
            raise SystemExit(f"not all of {count} ranks are there")
        time.sleep(0.05)
    time.sleep(0.5)
    began = time.perf_counter()
    procs = jobs.join(name, PATIENCE)
    took = time.perf_counter() - began
    procs.interrupt().get(PATIENCE)
    answered = time.perf_counter() - began
    assert len(procs) == count and not procs.dead()
    jobs.leave(procs)
    return {f"{what}, s": took, f"{what}, first answer, s": answered}


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.join", description=__doc__)
    parser.add_argument("what", nargs="*", choices=("cost", "join", []), help="by default both")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args()
    found: dict[str, float] = {}
    if not args.what or "join" in args.what:
        found |= join_real(8) | join_simulated(1000)
    if not args.what or "cost" in args.what:
        found |= cost()
    missed = 0
    for name, value in found.items():
        bar = BARS.get(name)
        missed += bar is not None and value > bar
        verdict = "" if bar is None else f"  bar {bar:g} {'ok' if value <= bar else 'MISS'}"
        print(f"{name:44}{value:10.3f}{verdict}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
