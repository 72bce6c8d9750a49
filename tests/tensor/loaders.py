"""Generators for the tests of pipes, which processes beside ranks import by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import torch


def counting(pipe: Any, count: int, size: int = 3) -> None:
    """Sends numbers, and where it is."""
    for k in range(count):
        at = torch.tensor([pipe.ranks["gpus"], pipe.sizes["gpus"]])
        pipe.send({"x": torch.full((2, size), float(k)), "at": at, "k": k})


def yielding(pipe: Any, base: torch.Tensor) -> Generator[torch.Tensor]:
    """Yields, and raises on one rank."""
    yield base + 1
    yield base + 2
    if pipe.ranks["gpus"] == 1:
        raise ValueError("no more data on rank 1")
    yield base + 3


def answering(pipe: Any) -> Generator[torch.Tensor]:
    """Doubles what it is sent."""
    while True:
        factor, value = pipe.recv()
        yield value * factor


def telling_pids(pipe: Any) -> None:
    """Its own process, and one of its own; then it waits, on rank 0 before the next value and elsewhere after it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pipe.send(torch.tensor([os.getpid(), child.pid]))
    if pipe.ranks["gpus"]:
        pipe.send(torch.zeros(1))
    pipe.recv()
