"""Measurement functions of all peer scripts: one JSON line per metric, the same names everywhere.

Runs inside the peers' own environments, so it needs the standard library alone.  The unit is in
the metric's name.  A metric's definition is here and in `peers/`; its row in the table in `metrics.py`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

PEER = os.environ.get("BENCH_PEER", "?")
#: Multiplies every time budget; less than 1 in a quick run.
SCALE = float(os.environ.get("BENCH_SCALE", "1"))
QUICK = SCALE < 1
#: Seconds after which an unfinished group is killed.
DEADLINE = float(os.environ.get("BENCH_DEADLINE", "300"))

SIZES = {"1KB": 1 << 10, "1MB": 1 << 20, "64MB": 64 << 20}
if not QUICK:
    SIZES["256MB"] = 256 << 20


def emit(metric: str, value: float | None, **extra: object) -> None:
    """Print one measurement."""
    print(json.dumps({"peer": PEER, "metric": metric, "value": value, **extra}), flush=True)


def note(metric: str, text: object) -> None:
    """Report why a metric has no number here."""
    emit(metric, None, note=str(text)[:400])


def version(**versions: str) -> None:
    """Report the measured versions."""
    emit("version", None, note=", ".join(f"{k} {v}" for k, v in versions.items()))


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile by rank (no interpolation)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def sample(
    call: Callable[[], object],
    budget: float = 1.5,
    least: int = 3,
    most: int = 5000,
    warm: int = 2,
) -> list[float]:
    """Call repeatedly for about `budget` seconds; return the seconds of each call."""
    for _ in range(warm):
        call()
    times: list[float] = []
    end = time.perf_counter() + budget * SCALE
    while len(times) < least or (len(times) < most and time.perf_counter() < end):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def tree() -> list[int]:
    """Return this process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as f:
                parent = int(f.read().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, ())
    return found


def cpu_seconds() -> float:
    """Return the CPU seconds used so far by all live threads of the whole process tree."""
    nanoseconds = 0
    for pid in tree():
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/schedstat") as f:
                    nanoseconds += int(f.read().split()[0])
        except OSError:
            continue
    return nanoseconds / 1e9


def latency(metric: str, call: Callable[[], object], budget: float = 1.5, **extra: object) -> None:
    """Measure p50 and p99 of a call in microseconds, and its CPU time over all processes.

    Other work on the machine hardly affects the CPU figure. 100 calls warm up.
    """
    sample(call, 0, 100, 100, warm=0)
    before = cpu_seconds()
    times = sample(call, budget, warm=0)
    cpu = cpu_seconds() - before
    emit(f"{metric}_us", round(percentile(times, 0.5) * 1e6, 1), n=len(times), **extra)
    emit(f"{metric}_p99_us", round(percentile(times, 0.99) * 1e6, 1), n=len(times), **extra)
    emit(f"{metric}_cpu_us", round(cpu / len(times) * 1e6, 1), n=len(times), **extra)


def rate(metric: str, batch: Callable[[], object], n: int, repeats: int = 7) -> None:
    """Measure calls per second, where one batch() makes n calls."""
    repeats = max(3, round(repeats * SCALE))
    emit(metric, round(n / percentile(sample(batch, 0, repeats, repeats), 0.5)), n=n)


def bandwidth(metric: str, nbytes: int, call: Callable[[], object], budget: float = 2.0, least: int = 5) -> None:
    """Measure the GB/s (1e9 bytes) of a call that moves nbytes."""
    times = sample(call, budget, 3, 400, warm=1) if QUICK else sample(call, budget, least, 400)
    median = percentile(times, 0.5)
    emit(f"{metric}_GBps", round(nbytes / median / 1e9, 4), us=round(median * 1e6, 1), n=len(times))


def memory(pid: int) -> tuple[float, float, float]:
    """Return the (resident, proportional, private) megabytes of a process."""
    kilobytes: dict[str, int] = {}
    with open(f"/proc/{pid}/smaps_rollup") as f:
        for line in f:
            key, _, rest = line.partition(":")
            if rest.strip().endswith("kB"):
                kilobytes[key] = int(rest.split()[0])
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return kilobytes["Rss"] / 1024, kilobytes["Pss"] / 1024, private / 1024


def emit_memory(metric: str, pids: Sequence[int], **extra: object) -> None:
    """Report medians over processes: `metric` is the resident size, with the proportional and the private size."""
    resident, proportional, private = zip(*map(memory, pids))
    emit(
        metric,
        round(statistics.median(resident), 1),
        pss=round(statistics.median(proportional), 1),
        private=round(statistics.median(private), 1),
        n=len(pids),
        **extra,
    )
    emit(metric.replace("rss", "pss"), round(statistics.median(proportional), 1), n=len(pids))
    emit(metric.replace("rss", "uss"), round(statistics.median(private), 2), n=len(pids))


def threads(pids: Sequence[int]) -> float:
    """Return the median number of threads of the processes."""
    return statistics.median(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)


def describe(error: BaseException) -> str:
    """Describe an error in one line, for a note."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]


def run(groups: dict[str, Callable[[], Any]]) -> None:
    """Run the groups named on the command line. A failed group is noted, and the others continue."""
    # If a run hangs, its stacks are written to the log.
    faulthandler.dump_traceback_later(DEADLINE * 0.95)
    for name in sys.argv[1:] or list(groups):
        if name not in groups:
            note(f"group:{name}", f"{PEER} has no group {name}")
            continue
        try:
            groups[name]()
        except Exception as error:
            traceback.print_exc()
            note(f"group:{name}", describe(error))
    faulthandler.cancel_dump_traceback_later()
