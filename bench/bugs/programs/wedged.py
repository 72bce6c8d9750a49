"""Native code of one rank never returns and never releases the interpreter lock; the others wait in a collective."""

from __future__ import annotations

import ctypes

import torch
from parts import average, backward, batch, begin, network
from seeded import GUILTY, STEP, happened

libc = ctypes.PyDLL(None)  # unlike CDLL, it holds the lock during calls


def augment(x: torch.Tensor, stuck: bool) -> torch.Tensor:
    """Transform a batch in native code."""
    if stuck:
        happened()
        libc.sleep(100_000)  # guilty
    return x


def train() -> None:
    """Train on transformed batches."""
    rank, _ = begin()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1000):
        x, y = batch(rank, step)
        x = augment(x, rank == GUILTY and step == STEP)  # guilty
        backward(model, x, y)
        average(model)
        optimizer.step()


if __name__ == "__main__":
    train()
