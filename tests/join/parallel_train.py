"""A job of the tests: in each of four ways to train in parallel, rank 1 is late in `load` until a file is there.

``parallel_train.py GATE``: the file of a way is ``GATE.WAY``, so that the test goes from one to the next.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def load(way: str) -> torch.Tensor:
    if rank == 1:
        while not os.path.exists(f"{sys.argv[1]}.{way}"):
            time.sleep(0.02)
    return torch.ones(4, 8)


def ddp() -> None:
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    batch = load("ddp")
    model(batch).sum().backward()


def fsdp() -> None:
    model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
    batch = load("fsdp")
    model(batch).sum().backward()


def dtensor() -> None:
    cut = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)])
    load("dtensor")
    cut.redistribute(mesh, [Replicate()])


def pipeline() -> None:
    stage = PipelineStage(torch.nn.Linear(8, 8), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda found, wanted: (found - wanted).sum())
    batch = load("pipeline")
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch)


dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
for way in (ddp, fsdp, dtensor, pipeline):
    way()
print(f"rank {rank} ends", flush=True)
dist.destroy_process_group()
