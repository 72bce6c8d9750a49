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


def timed(work: Any) -> tuple[float, float]:
    """Measure the seconds until the slowest rank has done the work, and the processor seconds of all ranks for it.

    The first figure is the median over repeats, after a warm-up.
    """
    times: list[float] = []
    cpu = 0.0
    for _ in range(1 + REPEATS):
        dist.barrier()
        cpu, start = cpu or time.process_time(), time.perf_counter()
        work()
        dist.barrier()
        times.append(time.perf_counter() - start)
    total = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    dist.all_reduce(total)
    return percentile(times[1:], 0.5), total.item() / (1 + REPEATS)


def chain(mesh: Any, of: Chain) -> tuple[float, float]:
    """Measure the microseconds of one operation in a chain, and the processor time of all ranks for it."""
    placements = {"shard": [Shard(0)], "replicate": [Replicate()]}
    x, y = (distribute_tensor(t, mesh, placements[p]) for t, p in zip(of.operands(), of.placements, strict=True))

    def work() -> None:
        z: Any = x
        for _ in range(of.count):
            z = of.operation(z, y)
        if not isinstance(z, DTensor):
            raise TypeError(f"{of.metric} gave {type(z)}")

    took, cpu = timed(work)
    return took / of.count * 1e6, cpu / of.count * 1e6


def main() -> None:
    """Measure one group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    found: dict[str, float] = {}
    with torch.no_grad():
        if sys.argv[1] == "dtensor":
            mesh = init_device_mesh("cpu", (ranks,))
            for of in CHAINS:
                took, cpu = chain(mesh, of)
                found |= {f"{of.metric}_us": round(took, 2), f"{of.metric}_cpu_us": round(cpu, 2)}
        else:
            x = torch.ones(ALLREDUCE_NUMBERS)
            took, cpu = timed(lambda: [dist.all_reduce(x) for _ in range(ALLREDUCES)])
            found = {
                "allreduce_GBps": round(x.nbytes * ALLREDUCES / took / 1e9, 3),
                "allreduce_cpu_s": round(cpu / ALLREDUCES, 3),
            }
    if dist.get_rank() == 0:
        version(torch=torch.__version__)
        for metric, value in found.items():
            emit(f"{metric}@{ranks}", value)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
