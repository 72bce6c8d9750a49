"""A training job of four ranks whose losses are the same in every run, whatever viewers do to it meanwhile.

``chaos_train.py GATE FOLDER [STEPS]``: each rank writes its losses, as hexadecimal floats, to ``FOLDER/losses.RANK``,
and its present step to ``FOLDER/step.RANK``. It ends after STEPS steps, or at the step at which all ranks have seen
that GATE exists.
"""

import os
import sys
import time

import torch
import torch.distributed as dist


def step(number: int) -> float:
    batch = torch.randn(4, 8, generator=data)
    target = batch.roll(1, 1)
    loss = (model(batch) - target).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    for each in model.parameters():
        dist.all_reduce(each.grad)
        each.grad /= dist.get_world_size()
    optimizer.step()
    return loss.item()


def ends(number: int) -> bool:
    if most:
        return number >= most
    time.sleep(0.004)
    if number % 10:
        return False
    gate = torch.tensor(float(os.path.exists(sys.argv[1])))
    dist.all_reduce(gate, dist.ReduceOp.MIN)
    return bool(gate)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
most = int(sys.argv[3]) if len(sys.argv) > 3 else 0
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.Generator().manual_seed(100 + rank)
torch.manual_seed(200 + rank)
present = os.open(os.path.join(sys.argv[2], f"step.{rank}"), os.O_CREAT | os.O_WRONLY, 0o600)
done = 0
with open(os.path.join(sys.argv[2], f"losses.{rank}"), "w") as losses:
    while not ends(done):
        losses.write(step(done).hex() + "\n")
        done += 1
        os.pwrite(present, done.to_bytes(8, "little"), 0)
dist.destroy_process_group()
