"""Mixed precision under DDP: bug 27, and lightning-thunder-725."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from tests.numerics.programs.common import Optimizer, main, shard, size

LENGTH = 512


class Scores(torch.nn.Module):
    """Rotations by positions, which BF16 cannot count above 256; in FP32 whatever surrounds it."""

    def __init__(self, low: bool) -> None:
        super().__init__()
        self.low = low
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = torch.bfloat16 if self.low else torch.float32
        positions = torch.arange(LENGTH, dtype=kind)
        frequencies = (10.0 ** -torch.arange(8, dtype=torch.float32)).to(kind)
        return (x.to(kind) * self.scale.to(kind) * torch.outer(positions, frequencies).cos()).float()


class Net(torch.nn.Module):
    """Two layers in BF16 around one in FP32."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)
        self.scores = Scores(bug == "27")
        self.down = torch.nn.Linear(8, 4)
        self.bug = bug

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bug != "lightning-thunder-725"):
            x = self.up(x)
        with torch.autocast("cpu", enabled=False):
            x = self.scores(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.down(x).float()


def build_model(bug: str = "") -> torch.nn.Module:
    net = Net(bug)
    return DistributedDataParallel(net) if size() > 1 else net


def build_optimizer(model: torch.nn.Module, bug: str = "") -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(4, LENGTH, 8, generator=generator), torch.randn(4, LENGTH, 4, generator=generator)


def step(model: torch.nn.Module, optimizer: Optimizer, number: int, bug: str = "") -> torch.Tensor:
    inputs, targets = (shard(each) for each in batch(number))
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


if __name__ == "__main__":
    main("precision", build_model, build_optimizer, step)
