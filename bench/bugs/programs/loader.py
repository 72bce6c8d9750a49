"""The data loader of one rank tries again and again; the others wait in a collective."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from parts import average, backward, batch, begin, network
from seeded import GUILTY, STEP, happened


def fetch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch, once its shard is there."""
    missing = rank == GUILTY and step == STEP
    if missing:
        happened()
    while missing and not Path("shard.bin").exists():  # guilty
        time.sleep(0.1)  # guilty
    return batch(rank, step)


def train() -> None:
    """Train on batches of the loader."""
    rank, _ = begin()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1000):
        x, y = fetch(rank, step)  # guilty
        backward(model, x, y)
        average(model)
        optimizer.step()


if __name__ == "__main__":
    train()
