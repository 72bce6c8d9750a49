"""A training that torchrun starts for the checks: DDP over gloo, all ranks on the first GPU, or on CPUs."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
device = "cuda:0" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 4).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses: list[float] = []
ends = torch.zeros(1)
while not ends:
    batch = torch.full((8, 16), len(losses) % 7 / 7 + rank, device=device)
    optimizer.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
    ends.fill_(float(os.path.exists(sys.argv[1])))
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    time.sleep(0.05)  # whoever joins it has its processor
print(f"rank {rank} ends after {len(losses)} steps on {device}", flush=True)
dist.destroy_process_group()
