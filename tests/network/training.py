"""Data-parallel training. No pytest here: every rank imports it."""

from __future__ import annotations

from typing import Any

import torch

from monarch_kernel.actor import Actor, current_rank, endpoint
from monarch_kernel.spmd import Group, share_state


class Trainer(Actor):
    """A linear model, whose gradients are averaged over all ranks."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.net = torch.nn.Linear(16, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.steps = 0

    @endpoint
    def join(self, group: Group) -> int:
        group.join()
        self.steps = share_state(self.steps, self.net, self.optimizer)
        return self.steps

    @endpoint
    def step(self) -> int:
        distributed: Any = torch.distributed
        generator = torch.Generator().manual_seed(self.steps * 100 + current_rank().rank)
        self.optimizer.zero_grad()
        self.net(torch.rand(8, 16, generator=generator)).sum().backward()
        for parameter in self.net.parameters():
            distributed.all_reduce(parameter.grad)
        self.optimizer.step()
        self.steps += 1
        return self.steps

    @endpoint
    def sum_of_weights(self) -> float:
        return sum(parameter.sum().item() for parameter in self.net.parameters())
