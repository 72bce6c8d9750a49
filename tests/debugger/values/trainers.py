"""Actors whose values are compared; importable by ranks."""

from __future__ import annotations

import threading
from typing import Any

from monarch_kernel.actor import Actor, context, endpoint
from monarch_kernel.debugger.rank.values import probe

SCALE = 3


class Trainer(Actor):
    """Has a loss, settings and a module, of which rank 3 has a slightly different one."""

    def __init__(self, torch: bool = False) -> None:
        self.rank = context().actor_instance.rank.rank
        self.loss = 0.7 if self.rank == 3 else 0.5
        self.config = {"lr": 0.1, "layers": [1, 2, 3]}
        self.reads = 0
        if torch:
            self.net = self._net()

    def _net(self) -> Any:
        import torch

        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(30, 100), torch.nn.Linear(100, 1000), torch.nn.Linear(1000, 10))
        if self.rank == 3:
            with torch.no_grad():
                net[1].weight[17, 3] = 1.5
                net[2].bias[9] = float("nan")
        return net

    @property
    def counted(self) -> int:
        """Counts how often it was evaluated."""
        self.reads += 1
        return self.rank

    def scaled(self) -> float:
        """A plain method."""
        return self.loss * SCALE

    @endpoint
    def step(self, amount: int) -> float:
        """Stops in the middle."""
        here = amount + self.rank // 3
        breakpoint()
        return here * self.loss


_proceed = threading.Event()


class Slow(Actor):
    """Is made when it is told to."""

    def __init__(self) -> None:
        self.done = _proceed.wait(60)


def proceed() -> None:
    """Tell it."""
    _proceed.set()


def kept() -> tuple[int, list[str]]:
    """What is kept of values that were asked about, and the threads of timers."""
    return len(probe._kept), [thread.name for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
