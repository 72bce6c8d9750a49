"""One rank reads a row that is no number, and raises; the others are in a collective."""

from __future__ import annotations

import torch
from parts import average, backward, begin, network
from seeded import GUILTY, STEP, happened


def parse(text: str) -> torch.Tensor:
    """Rows of numbers."""
    rows = []
    for line in text.splitlines():
        if "oops" in line:
            happened()
        rows.append([float(value) for value in line.split(",")])  # guilty
    return torch.tensor(rows)


def train() -> None:
    """Train on parsed rows."""
    rank, _ = begin()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1000):
        bad = rank == GUILTY and step == STEP
        text = "1,2,3,4,5,6,7,8\n8,7,6,5,4,3,2," + ("oops" if bad else "1")
        x = parse(text)  # guilty
        backward(model, x, x.sum(1, keepdim=True))
        average(model)
        optimizer.step()


if __name__ == "__main__":
    train()
