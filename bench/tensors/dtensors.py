"""Operations on sharded tensors driven from a controller: ``python -m bench.tensors.dtensors GROUP RANKS``.

``spmd`` does the same work as a program of each rank.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from bench.measure import emit, percentile, run, sample, version
from bench.tensors.work import ALLREDUCE_NUMBERS, ALLREDUCES, CHAINS, REPEATS, Chain
from monarch_kernel._version import __version__


def timed(work: Any) -> float:
    """Seconds until all ranks have done it: the median over repeats, after one that warms up."""
    return percentile(sample(work, 0, REPEATS, REPEATS, warm=1), 0.5)


def chain(mesh: Any, of: Chain) -> float:
    """Microseconds of one operation in a chain of them."""
    import monarch_kernel

    specs = {"shard": ["ranks", None], "replicate": [None, None]}
    x, y = (
        monarch_kernel.distribute(t, mesh, sharding_spec=specs[p])
        for t, p in zip(of.operands(), of.placements, strict=True)
    )

    def work() -> None:
        z: Any = x
        for _ in range(of.count):
            z = of.operation(z, y)
        mesh.synchronize()

    return timed(work) / of.count * 1e6


def dtensor(ranks: int) -> None:
    """Chains of DTensor operations."""
    mesh = importlib.import_module("monarch_kernel.distributed").Mesh(shape=(ranks,), mesh_dim_names=("ranks",))
    with torch.no_grad():
        for of in CHAINS:
            emit(f"{of.metric}@{ranks}", round(chain(mesh, of), 2))


def allreduce(ranks: int) -> None:
    """A gigabyte on each rank, summed in place by ``reduce_``."""
    from monarch_kernel.actor import this_host
    from monarch_kernel.tensor import fetch_shard

    procs = this_host().spawn_procs(per_host={"gpus": ranks})
    with procs.activate():
        x = torch.ones(ALLREDUCE_NUMBERS)

        def work() -> None:
            for _ in range(ALLREDUCES):
                x.reduce_("gpus", reduction="sum")  # pyright: ignore[reportAttributeAccessIssue]  # a handle has it
            fetch_shard(x[0]).get()

        took = timed(work) / ALLREDUCES
    emit(f"allreduce_GBps@{ranks}", round(x.nbytes / took / 1e9, 3))


if __name__ == "__main__":
    torch.set_num_threads(1)
    version(monarch_kernel=__version__, torch=torch.__version__)
    count = int(sys.argv.pop())
    run({"dtensor": lambda: dtensor(count), "allreduce": lambda: allreduce(count)})
