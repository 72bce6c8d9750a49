"""Weights on each rank, and FP32 master weights sharded over the ranks (ZeRO 1), by hand: bugs 22, 24 to 26.

With bug 24, and with "bf16", which is right, the weights are in BF16.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from tests.numerics.programs.common import Optimizer, main, shard, size

WIDTH, VOCABULARY = 16, 32
RATE, DECAY = 0.1, 0.1


class Net(torch.nn.Module):
    """Two layers between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


class ShardedSGD(Optimizer):
    """SGD on this rank's part of each master weight; the parts are gathered into the model's weights."""

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]], bug: str) -> None:
        self.named, self.bug = list(named), bug
        super().__init__({id(each): each for _, each in self.named}.values(), {"lr": RATE})
        self.masters = {id(each): shard(each.detach().float().flatten()) for _, each in self.named}
        parts = [(name, torch.nn.Parameter(self.masters[id(each)])) for name, each in self.named]
        self.inner = torch.optim.SGD(parts, lr=RATE)

    def refresh(self) -> None:
        """Copy the model's weights into the master weights."""
        for _, each in self.named:
            self.masters[id(each)].copy_(shard(each.detach().float().flatten()))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for (_, weight), part in zip(self.named, self.inner.param_groups[0]["params"]):
            decay = DECAY * weight.float().flatten()
            if self.bug == "25" and dist.is_initialized():
                dist.all_reduce(decay)
            part.data -= RATE * shard(decay)
            part.grad = shard(weight.grad.float().flatten())
        stale = {name: self.masters[id(weight)].clone() for name, weight in self.named if name.startswith("layers.1")}
        self.inner.step()
        for name, weight in self.named:
            part = stale[name] if self.bug == "26" and name in stale else self.masters[id(weight)]
            parts = [torch.empty_like(part) for _ in range(size())]
            if dist.is_initialized():
                dist.all_gather(parts, part)
            else:
                parts = [part]
            weight.copy_(torch.cat(parts).view_as(weight))


def build_model(bug: str = "") -> torch.nn.Module:
    return Net().bfloat16() if bug in ("24", "bf16") else Net()


def build_optimizer(model: torch.nn.Module, bug: str = "") -> Optimizer:
    return ShardedSGD(model.named_parameters(remove_duplicate=bug != "22"), bug)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step."""
    tokens = torch.randint(VOCABULARY, (8, 9), generator=torch.Generator().manual_seed(1000 + number))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def load(model: torch.nn.Module) -> None:
    """Load a checkpoint: weights of another seed."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)


def step(model: torch.nn.Module, optimizer: Optimizer, number: int, bug: str = "") -> torch.Tensor:
    if number == 3:
        load(model)
        if bug != "24":
            optimizer.refresh()  # type: ignore[attr-defined]
    tokens, targets = (shard(each) for each in batch(number))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
    loss.backward()
    if dist.is_initialized():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size()
    optimizer.step()
    return loss.detach()


if __name__ == "__main__":
    main("sharded_optimizer", build_model, build_optimizer, step)
