"""A program of the tests with DeepSpeed, which trains until the file named in its arguments is there."""

import argparse
import os
import time

import deepspeed
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)  # the launcher tells it
parser.add_argument("ends")
args = parser.parse_args()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now, for half a minute
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
torch.manual_seed(args.local_rank)
net = torch.nn.Linear(4, 4)
model, optimizer, _, _ = deepspeed.initialize(
    model=net,
    optimizer=torch.optim.SGD(net.parameters(), lr=1e-3),
    config={"train_micro_batch_size_per_gpu": 4, "steps_per_print": 2**31},
)
losses = []
ends = torch.zeros(1)
while not ends:
    loss = model(torch.rand(4, 4)).pow(2).mean()
    model.backward(loss)
    model.step()
    losses.append(float(loss.detach()))
    ends.fill_(float(os.path.exists(args.ends)))
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    time.sleep(0.02)
print(f"rank {args.local_rank} ends after {len(losses)} steps", flush=True)
dist.destroy_process_group()
