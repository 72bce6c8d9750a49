"""FSDP2: bug 23, and accelerate-2665."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.numerics.programs.common import Optimizer, main, shard, size


class Block(torch.nn.Module):
    """Two layers beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(torch.nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.out = torch.nn.Linear(16, 4)
        self.unwrapped: list[torch.nn.Parameter] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def build_model(bug: str = "") -> torch.nn.Module:
    net = Net()
    before = list(net.parameters())
    if size() > 1:
        mesh = init_device_mesh("cpu", (size(),))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    if bug in ("23", "accelerate-2665"):
        net.unwrapped = before
    return net


def build_optimizer(model: torch.nn.Module, bug: str = "") -> Optimizer:
    return torch.optim.Adam(model.unwrapped or model.parameters(), lr=0.01)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def step(model: torch.nn.Module, optimizer: Optimizer, number: int, bug: str = "") -> torch.Tensor:
    inputs, targets = (shard(each) for each in batch(number))
    model.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


if __name__ == "__main__":
    main("fully_sharded", build_model, build_optimizer, step)
