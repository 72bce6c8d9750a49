"""Operations on sharded tensors driven from a controller: ``python -m bench.tensors.dtensors GROUP RANKS``.

``spmd`` does the same work as a program of each rank.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from bench.measure import cpu_seconds, emit, percentile, run, sample, version
from bench.tensors.work import ALLREDUCE_NUMBERS, ALLREDUCES, CHAINS, REPEATS, Chain
from monarch_kernel._version import __version__

if TYPE_CHECKING:
    from monarch_kernel.distributed import Mesh


def timed(work: Any) -> tuple[float, float]:
    """Measure the seconds until all ranks have done the work, and the processor seconds of all processes for it.

    The first figure is the median over repeats, after a warm-up.
    """
    work()
    cpu = cpu_seconds()
    took = percentile(sample(work, 0, REPEATS, REPEATS, warm=0), 0.5)
    return took, (cpu_seconds() - cpu) / REPEATS


def _nothing(_: torch.Tensor) -> None:
    """Do nothing: ranks run this after all previous work."""


def chain(mesh: Mesh, of: Chain) -> tuple[float, float]:
    """Measure the microseconds of one operation in a chain, and the processor time of all processes for it."""
    from monarch_kernel.distributed import distribute
    from monarch_kernel.tensor import call_on_shard_and_fetch

    specs = {"shard": ["ranks", None], "replicate": [None, None]}
    x, y = (distribute(t, mesh, specs[p]) for t, p in zip(of.operands(), of.placements, strict=True))

    def work() -> None:
        z: Any = x
        for _ in range(of.count):
            z = of.operation(z, y)
        call_on_shard_and_fetch(_nothing, z).get()  # returns when every rank has reached it

    took, cpu = timed(work)
    return took / of.count * 1e6, cpu / of.count * 1e6


def dtensor(ranks: int) -> None:
    """Measure chains of DTensor operations."""
    from monarch_kernel.distributed import Mesh

    with Mesh((ranks,), ("ranks",)) as mesh, torch.no_grad():
        for of in CHAINS:
            took, cpu = chain(mesh, of)
            emit(f"{of.metric}_us@{ranks}", round(took, 2))
            emit(f"{of.metric}_cpu_us@{ranks}", round(cpu, 2))


def allreduce(ranks: int) -> None:
    """Sum a gigabyte on each rank in place by ``reduce_``."""
    from monarch_kernel.actor import this_host
    from monarch_kernel.tensor import fetch_shard

    procs = this_host().spawn_procs(per_host={"gpus": ranks})
    with procs.activate():
        x = torch.ones(ALLREDUCE_NUMBERS)

        def work() -> None:
            for _ in range(ALLREDUCES):
                x.reduce_("gpus", reduction="sum")  # pyright: ignore[reportAttributeAccessIssue]  # a handle has it
            fetch_shard(x[0]).get()

        took, cpu = timed(work)
    emit(f"allreduce_GBps@{ranks}", round(x.nbytes * ALLREDUCES / took / 1e9, 3))
    emit(f"allreduce_cpu_s@{ranks}", round(cpu / ALLREDUCES, 3))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # on the ranks, as set by torchrun
    version(monarch_kernel=__version__, torch=torch.__version__)
    count = int(sys.argv.pop())
    run({"dtensor": lambda: dtensor(count), "allreduce": lambda: allreduce(count)})
