"""DistributedDataParallel: bugs 1, 4, 5, 7, 8, 28, and pytorch-104336, x-jxmnop."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from tests.numerics.programs.common import Optimizer, main, rank, shard, size


class RunningMean(torch.nn.Module):
    """Subtract a running mean of all ranks' activations."""

    def __init__(self, width: int, local: bool) -> None:
        super().__init__()
        self.local = local
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = x.mean(0)
            if dist.is_initialized() and not self.local:
                dist.all_reduce(mean)
                mean /= size()
            self.mean.lerp_(mean, 0.1)
        return x - self.mean.clone()


class Net(torch.nn.Module):
    """Three layers, with a running mean behind the first."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(*each) for each in ((8, 16), (16, 16), (16, 4))])
        self.norm = RunningMean(16, local=bug == "7")
        self.temperature: torch.nn.Parameter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layers[0](x)).relu()
        x = self.layers[2](self.layers[1](x).relu())
        return x * self.temperature if self.scaled else x

    scaled = True


def build_model(bug: str = "") -> torch.nn.Module:
    net = Net(bug)
    if bug != "1":
        net.temperature = torch.nn.Parameter(torch.full((4,), 1.5))
    if size() == 1:
        return net
    model = DistributedDataParallel(net)
    model.broadcast_buffers = False  # the argument has another name since torch 2.13
    if bug == "1":  # the loss scales by it, outside of forward
        net.temperature, net.scaled = torch.nn.Parameter(torch.full((4,), 1.5)), False
    if bug == "8" and rank() == 1:
        net.layers[2].load_state_dict({"weight": torch.ones(4, 16) / 8, "bias": torch.zeros(4)})
    if bug == "pytorch-104336":
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        model.double().float()  # on GPUs: .cpu().cuda()
    return model


def build_optimizer(model: torch.nn.Module, bug: str = "") -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.15 if bug == "4b" and rank() == 1 else 0.1, momentum=0.9)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)


def step(model: torch.nn.Module, optimizer: Optimizer, number: int, bug: str = "") -> torch.Tensor:
    inputs, targets = (shard(each, index=0 if bug == "5" else None) for each in batch(number))
    optimizer.zero_grad()
    called = model.module if bug == "x-jxmnop" and isinstance(model, DistributedDataParallel) else model
    outputs = called(inputs)
    if bug == "1" and isinstance(model, DistributedDataParallel):
        outputs = outputs * model.module.temperature
    loss = F.mse_loss(outputs, targets)
    loss.backward()
    if not (bug == "4" and rank() == 1 and number == 2):
        optimizer.step()
    if bug == "28" and rank() == 1 and number == 2:  # what faulty arithmetic would have left
        weight = dict(model.named_parameters())["module.layers.1.weight"].data
        weight.view(torch.int32)[3, 5] ^= 1 << 16
    return loss.detach()


if __name__ == "__main__":
    main("data_parallel", build_model, build_optimizer, step)
