"""A rank decides for itself that training has converged, and goes to the final barrier; the others wait for it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from parts import average, backward, batch, begin, network
from seeded import GUILTY, STEP, happened


def train() -> None:
    """Train until it has converged."""
    rank, _ = begin()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1000):
        x, y = batch(rank, step)
        backward(model, x, y)
        if rank == GUILTY and step == STEP:  # the bug: its own loss is small enough
            happened()  # guilty
            break  # guilty
        average(model)
        optimizer.step()
    dist.barrier()  # guilty


if __name__ == "__main__":
    train()
