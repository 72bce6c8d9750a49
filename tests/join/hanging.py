"""A job of the tests: after some steps rank 1 sleeps in `load`, until the file named in its arguments is there."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def load(step: int) -> None:
    secret = "do-not-tell"  # a value of a variable, which no report has
    if dist.get_rank() == 1 and step == 5:
        if "--stopped" in sys.argv:
            os.kill(os.getpid(), signal.SIGSTOP)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.2)
    del secret


def train() -> None:
    for step in range(10):
        load(step)
        dist.all_reduce(torch.ones(1))


dist.init_process_group("gloo", timeout=timedelta(seconds=5 if "--times-out" in sys.argv else 1800))
train()
print(f"rank {dist.get_rank()} ends", flush=True)
dist.destroy_process_group()
