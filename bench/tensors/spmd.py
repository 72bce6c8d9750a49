"""The work of ``dtensors`` as plain SPMD: ``torchrun --nproc-per-node RANKS -m bench.tensors.spmd GROUP``.

Each rank runs this program, and the first one prints.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bench.measure import emit, percentile, version
from bench.tensors.work import ALLREDUCE_NUMBERS, ALLREDUCES, CHAINS, REPEATS, Chain


def timed(work: Any) -> float:
    """Seconds until the slowest rank has done it: the median over repeats, after one that warms up."""
    times: list[float] = []
    for _ in range(1 + REPEATS):
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return percentile(times[1:], 0.5)


def chain(mesh: Any, of: Chain) -> float:
    """Microseconds of one operation in a chain of them."""
    placements = {"shard": [Shard(0)], "replicate": [Replicate()]}
    x, y = (distribute_tensor(t, mesh, placements[p]) for t, p in zip(of.operands(), of.placements, strict=True))

    def work() -> None:
        z: Any = x
        for _ in range(of.count):
            z = of.operation(z, y)
        if not isinstance(z, DTensor):
            raise TypeError(f"{of.metric} gave {type(z)}")

    return timed(work) / of.count * 1e6


def main() -> None:
    """Measure one group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    found: dict[str, float] = {}
    with torch.no_grad():
        if sys.argv[1] == "dtensor":
            mesh = init_device_mesh("cpu", (ranks,))
            found = {of.metric: round(chain(mesh, of), 2) for of in CHAINS}
        else:
            x = torch.ones(ALLREDUCE_NUMBERS)
            took = timed(lambda: [dist.all_reduce(x) for _ in range(ALLREDUCES)]) / ALLREDUCES
            found = {"allreduce_GBps": round(x.nbytes / took / 1e9, 3)}
    if dist.get_rank() == 0:
        version(torch=torch.__version__)
        for metric, value in found.items():
            emit(f"{metric}@{ranks}", value)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
