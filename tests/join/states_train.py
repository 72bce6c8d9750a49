"""A job of the tests that has what a training has: modules, optimizer, scheduler, data loader, random numbers, tasks.

``states_train.py GATE``: it trains until the file is there. Rank 1 differs from rank 0 in one place of each.
"""

import asyncio
import os
import random
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset


class Feeder:
    """Feeds the loop from an event loop on a thread, as programs with asynchronous input do."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()

    async def wait_for_input(self) -> None:
        await self.ready.wait()

    def run(self) -> None:
        asyncio.run(self.wait_for_input())


def step(number: int, batch: torch.Tensor) -> float:
    loss = model(batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    for each in model.parameters():
        dist.all_reduce(each.grad)
    optimizer.step()
    scheduler.step()
    return float(loss.detach())


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
random.seed(rank)
generator = torch.Generator().manual_seed(rank)
with torch.random.fork_rng():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1 if rank else 0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000 + rank)
loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4 - 2 * rank, shuffle=True, generator=generator)
feeder = Feeder()
thread = threading.Thread(target=feeder.run, name="feeder", daemon=True)
thread.start()
losses = []
ends = torch.zeros(1)
while not ends:
    loss = step(len(losses), next(iter(loader))[0])
    losses.append(loss)
    ends.fill_(float(os.path.exists(sys.argv[1])))
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    time.sleep(0.02)
print(f"rank {rank} ends after {len(losses)} steps", flush=True)
dist.destroy_process_group()
