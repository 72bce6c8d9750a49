"""Tensor operations on a mesh of this host: this project (peer `ours`), or torchmonarch; both run exactly this code.

``python -m bench.tensors.engine GROUP RANKS`` prints measurements; each is named ``METRIC@RANKS``.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version as installed
from typing import Any

import torch

from bench.measure import PEER, QUICK, cpu_seconds, emit, note, percentile, run, sample, version

PACKAGE = "monarch_kernel" if PEER == "ours" else "monarch"
#: The number of operations sent before the first value is requested. torchmonarch takes a millisecond for one.
MANY = (1000 if QUICK else 4000) if PEER == "ours" else (200 if QUICK else 1000)
STEPS = (20 if QUICK else 100) if PEER == "ours" else (5 if QUICK else 20)
REPLAYS = (50 if QUICK else 200) if PEER == "ours" else (10 if QUICK else 50)
#: The number of operations that are recorded once and replayed.
RECORDED = 50
REPEATS = 3 if QUICK else 5


class Engine:
    """A mesh of this host on which torch operations run, and the names of the measured library."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        # Any: the names stand for two libraries with one API.
        self.api: Any = importlib.import_module("monarch_kernel.tensor" if PEER == "ours" else "monarch")
        actor: Any = importlib.import_module(f"{PACKAGE}.actor")
        self.procs: Any = actor.this_host().spawn_procs(per_host={"gpus": ranks})

    def fetch(self, value: Any) -> Any:
        """Return the value on the first rank."""
        return self.api.fetch_shard(value).get(timeout=300)

    def compiled(self, function: Callable[..., Any]) -> Any:
        """Return the function, to be recorded at its first call."""
        module: Any = importlib.import_module(f"{PACKAGE}.common._coalescing")
        # verify=False is the faster form of both. Ours is measured with its default, which has more checks.
        return module.compile(function) if PEER == "ours" else module.compile(function, verify=False)

    def emit(self, metric: str, value: float, **extra: object) -> None:
        """Report one measurement, with the number of ranks in its name."""
        emit(f"{metric}@{self.ranks}", value, **extra)


def batches(batch: Callable[[], object], n: int) -> tuple[float, float]:
    """Measure the microseconds of one of n operations: the median over batches, and all processes' CPU time.

    Other work on the machine hardly affects the second figure.
    """
    batch()
    before = cpu_seconds()
    took = percentile(sample(batch, 0, REPEATS, REPEATS, warm=0), 0.5)
    return took / n * 1e6, (cpu_seconds() - before) / REPEATS / n * 1e6


def latency(engine: Engine, metric: str, call: Callable[[], object]) -> None:
    """Measure p50, p99 and processor time of consecutive calls."""
    sample(call, 0, 20, 20, warm=0)
    before = cpu_seconds()
    times = sample(call, 1.0, 30, 1000, warm=0)
    cpu = cpu_seconds() - before
    engine.emit(f"{metric}_us", round(percentile(times, 0.5) * 1e6, 1), n=len(times))
    engine.emit(f"{metric}_p99_us", round(percentile(times, 0.99) * 1e6, 1), n=len(times))
    engine.emit(f"{metric}_cpu_us", round(cpu / len(times) * 1e6, 1), n=len(times))


def operations(engine: Engine) -> None:
    """Measure more than a thousand operations before a value is requested, fetches, and single operations."""
    x, y = torch.zeros(4, 4), torch.ones(4, 4)
    for _ in range(50):
        x = x + y
    engine.fetch(x)
    cpu: list[float] = []

    def many() -> None:
        nonlocal x
        before = time.process_time()
        for _ in range(MANY):
            x = x + y
        cpu.append(time.process_time() - before)
        engine.fetch(x)

    took, spent = batches(many, MANY)
    engine.emit("ops_per_s", round(1e6 / took), n=MANY)
    engine.emit("op_all_cpu_us", round(spent, 2), n=MANY)
    engine.emit("op_cpu_us", round(statistics.median(cpu) / MANY * 1e6, 2), n=MANY)
    made = 50 + MANY * len(cpu)
    if (found := engine.fetch(x[0, 0]).item()) != made:
        raise AssertionError(f"{made} additions gave {found}")

    def coalesced() -> None:
        nonlocal x
        with engine.api.coalescing():
            for _ in range(MANY):
                x = x + y
        engine.fetch(x)

    engine.emit("coalesced_per_s", round(1e6 / batches(coalesced, MANY)[0]), n=MANY)
    latency(engine, "fetch", lambda: engine.fetch(x))
    latency(engine, "op_fetch", lambda: engine.fetch(x + y))


class Training:
    """An MLP trained on one batch."""

    def __init__(self, optimizer: Any) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)
        self.inputs, self.targets = torch.rand(16, 64), torch.rand(16, 64)

    def step(self) -> Any:
        """Run forward, backward, and the optimizer; return the loss."""
        self.optimizer.zero_grad()
        loss = ((self.model(self.inputs) - self.targets) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def steps(engine: Engine, metric: str, step: Callable[[], Any], count: int) -> None:
    """Measure consecutive steps, until the last has run. The loss must decrease."""
    loss = step()
    for _ in range(2):
        loss = step()
    first = engine.fetch(loss).item()

    def several() -> None:
        nonlocal loss
        for _ in range(count):
            loss = step()
        engine.fetch(loss)

    took, spent = batches(several, count)
    engine.emit(f"{metric}_us", round(took, 1), n=count)
    engine.emit(f"{metric}_cpu_us", round(spent, 1), n=count)
    if not (last := engine.fetch(loss).item()) < first:
        raise AssertionError(f"the loss was {first} and is {last}")


def replays(engine: Engine) -> None:
    """Measure a function of 50 operations, recorded once: consecutive calls, until the last has run."""
    x, y = torch.zeros(4, 4), torch.ones(4, 4)

    def additions(x: Any, y: Any) -> Any:
        for _ in range(RECORDED):
            x = x + y
        return x

    replay = engine.compiled(additions)
    calls = 0
    issued: list[float] = []

    def several() -> None:
        nonlocal x, calls
        start = time.perf_counter()
        for _ in range(REPLAYS):
            x = replay(x, y)
        issued.append(time.perf_counter() - start)
        calls += REPLAYS
        engine.fetch(x)

    took, spent = batches(several, REPLAYS)
    engine.emit("replay_us", round(took, 1), n=REPLAYS)
    engine.emit("replay_cpu_us", round(spent, 1), n=REPLAYS)
    engine.emit("replay_call_us", round(statistics.median(issued) / REPLAYS * 1e6, 1), n=REPLAYS)
    if (found := engine.fetch(x[0, 0]).item()) != calls * RECORDED:
        raise AssertionError(f"{calls} replays of {RECORDED} additions gave {found}")


def attempt(name: str, measure: Callable[[], None]) -> None:
    """Measure; note operations that the library does not support, and continue."""
    try:
        measure()
    except Exception as error:
        note(f"{name}", f"{type(error).__name__}: {error}".replace("\n", " ")[:200])


def whole(ranks: int) -> None:
    """Measure everything with this many ranks."""
    start = time.perf_counter()
    engine = Engine(ranks)
    with engine.procs.activate():
        engine.fetch(torch.ones(2) * 2)
        engine.emit("start_s", round(time.perf_counter() - start, 3))
        attempt("operations", lambda: operations(engine))
        training = Training(torch.optim.SGD)
        attempt("step", lambda: steps(engine, "step", training.step, STEPS))
        attempt("replay", lambda: replays(engine))
        step = engine.compiled(training.step)
        attempt("replay of a step", lambda: steps(engine, "replay_step", step, REPLAYS))
        adamw = Training(torch.optim.AdamW)
        attempt("step with AdamW", lambda: steps(engine, "step_adamw", adamw.step, STEPS))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if PEER == "ours":
        from monarch_kernel._version import __version__

        version(monarch_kernel=__version__, torch=torch.__version__)
    else:
        version(torchmonarch=installed("torchmonarch"), torch=torch.__version__)
    count = int(sys.argv.pop())
    run({"engine": lambda: whole(count)})
    sys.stdout.flush()
    # A shutdown that hangs must not delay the run.
    watchdog = threading.Timer(5, lambda: os._exit(0))
    watchdog.daemon = True
    watchdog.start()
