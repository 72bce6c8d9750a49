"""One rank sends its buffers before its gradients, the others after; all of them wait."""

from __future__ import annotations

import torch
import torch.distributed as dist
from parts import average, backward, batch, begin, network
from seeded import GUILTY, STEP, happened


def share_buffers(model: torch.nn.Module) -> None:
    """Give all ranks the statistics of rank 0."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)  # guilty


def train() -> None:
    """Train with common statistics."""
    rank, _ = begin()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1000):
        x, y = batch(rank, step)
        backward(model, x, y)
        if rank == GUILTY and step == STEP:  # the bug
            happened()  # guilty
            share_buffers(model)  # guilty
            average(model)
        else:
            average(model)
            share_buffers(model)
        optimizer.step()


if __name__ == "__main__":
    train()
