"""Data parallelism without a wrapper, with gradient accumulation and clipping: bugs 2, 2b, 3, 6."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from tests.numerics.programs.common import Optimizer, main, rank, shard, size

MICRO_BATCHES = 2
#: The largest norm of gradients. In half of the steps the norm is smaller, but not that of a rank's own gradient.
MOST = 0.55


class Net(torch.nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(*each) for each in ((8, 16), (16, 16), (16, 4))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


def build_model(bug: str = "") -> torch.nn.Module:
    if bug == "3":
        torch.manual_seed(rank())
    return Net()


def build_optimizer(model: torch.nn.Module, bug: str = "") -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)


def step(model: torch.nn.Module, optimizer: Optimizer, number: int, bug: str = "") -> torch.Tensor:
    optimizer.zero_grad()
    total = torch.zeros(())
    # Each micro-batch of the reference is that of all ranks together.
    inputs, targets = batch(number)
    for each_input, each_target in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)):
        loss = F.mse_loss(model(shard(each_input)), shard(each_target)) / MICRO_BATCHES
        (loss / MICRO_BATCHES if bug == "2b" else loss).backward()
        total += loss.detach()
    if bug == "6":
        torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)
    if dist.is_initialized():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            if bug != "2":
                parameter.grad /= size()
    if bug != "6":
        torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)
    optimizer.step()
    return total


if __name__ == "__main__":
    main("data_parallel_by_hand", build_model, build_optimizer, step)
