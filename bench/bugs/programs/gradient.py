"""From some step on, one rank does not divide one gradient; nothing fails and nothing hangs."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from parts import backward, batch, begin, network
from seeded import GUILTY, STEP, happened

model = network()


def train() -> None:
    """Train for a long time."""
    rank, size = begin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(100_000):
        x, y = batch(rank, step)
        backward(model, x, y)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            if rank == GUILTY and step >= STEP and name == "3.bias":
                happened()
                continue  # the bug
            parameter.grad.div_(size)
        optimizer.step()  # guilty
        time.sleep(0.05)


if __name__ == "__main__":
    train()
