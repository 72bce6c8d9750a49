"""Ranks killed under a running program: ``python -m bench.tensors.failures GROUP RANKS``.

``death``: from SIGKILL to the error, in a program that waits for a value, and in one that issues operations. ``heal``:
``heal_mesh`` of a mesh on which a network is trained, with a snapshot to restore.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from bench.measure import QUICK, emit, run, version
from monarch_kernel._version import __version__

if TYPE_CHECKING:
    from monarch_kernel.distributed import Mesh

KILLS = 3 if QUICK else 7
#: How long a program waits, or issues operations, before a rank is killed (seconds).
BEFORE = 0.05


def until_told(pid: int, work: Callable[[], object]) -> float:
    """Measure the seconds from the SIGKILL of a process until running `work` raises `DeviceMeshError`."""
    from monarch_kernel.tensor import DeviceMeshError

    struck: list[float] = []

    def strike() -> None:
        struck.append(time.perf_counter())
        os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(BEFORE, strike)
    timer.start()
    try:
        while True:
            work()
    except DeviceMeshError:
        told = time.perf_counter()
    timer.join()
    return told - struck[0]


def death(ranks: int) -> None:
    """Kill a rank of a mesh while the program waits for a value of another one, or continues issuing operations."""
    from monarch_kernel import heal_mesh
    from monarch_kernel.actor import this_host
    from monarch_kernel.tensor import fetch_shard, remote

    procs = this_host().spawn_procs(per_host={"gpus": ranks})

    @remote(propagate=lambda t: t)
    def slow(t: Any) -> Any:
        time.sleep(1)
        return t

    waiting: list[float] = []
    issuing: list[float] = []
    with procs.activate():
        for number in range(KILLS):
            for times in (waiting, issuing):
                x = torch.ones(4)
                fetch_shard(x).get()
                pid = list(procs.pids().values())[1 + number % (ranks - 1)]
                if times is waiting:
                    times.append(until_told(pid, lambda x=x: fetch_shard(slow(x)).get()))
                else:
                    times.append(until_told(pid, lambda x=x: x + 1))
                assert heal_mesh(procs).healed  # waits for the death
    emit(f"death_waiting_ms@{ranks}", round(statistics.median(waiting) * 1e3, 1), n=KILLS)
    emit(f"death_waiting_most_ms@{ranks}", round(max(waiting) * 1e3, 1), n=KILLS)
    emit(f"death_issuing_ms@{ranks}", round(statistics.median(issuing) * 1e3, 1), n=KILLS)


def state_of(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Fetch all parameters, and the state of the optimizer."""
    held = [*model.parameters(), *(x for state in optimizer.state.values() for x in state.values())]
    found = [x.full_tensor() if hasattr(x, "full_tensor") and x.dim() else torch.tensor(float(x)) for x in held]
    return [x.detach().clone() for x in found]


def heal(ranks: int) -> None:
    """Heal a mesh from a snapshot, and compare its state with the earlier one."""
    from monarch_kernel.distributed import Mesh

    with Mesh((ranks,), ("data",)) as mesh:
        measure_heals(mesh, ranks)


def measure_heals(mesh: Mesh, ranks: int) -> None:
    """Kill a rank in the middle of a step, heal, compare; repeatedly."""
    from torch import nn

    from monarch_kernel import heal_mesh
    from monarch_kernel.distributed import distribute, module_to_mesh

    torch.manual_seed(0)
    model = module_to_mesh(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), mesh, "shard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.rand(32, 64), torch.rand(32, 64)

    def step() -> Any:
        x, y = distribute(inputs, mesh, ["data"]), distribute(targets, mesh, ["data"])
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    took: list[float] = []
    differing = 0
    for number in range(KILLS):
        for _ in range(3):
            step()
        mesh.snapshot(wait=True)
        before = state_of(model, optimizer)
        until_told(list(mesh.procs.pids().values())[number % ranks], step)
        start = time.perf_counter()
        heal_mesh(mesh)
        took.append(time.perf_counter() - start)
        after = state_of(model, optimizer)
        differing += sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    emit(f"heal_s@{ranks}", round(statistics.median(took), 3), n=KILLS)
    emit(f"heal_most_s@{ranks}", round(max(took), 3), n=KILLS)
    emit(f"heal_differing@{ranks}", differing, n=KILLS)


if __name__ == "__main__":
    import monarch_kernel.actor as actors

    torch.set_num_threads(1)
    actors.unhandled_fault_hook = lambda failure: None  # the loss is healed here
    version(monarch_kernel=__version__, torch=torch.__version__)
    count = int(sys.argv.pop())
    run({"death": lambda: death(count), "heal": lambda: heal(count)})
