"""Common parts of the six programs: the process group, a small model, and its batches."""

from __future__ import annotations

import torch
import torch.distributed as dist


def begin() -> tuple[int, int]:
    """Join the default group, unless it has been joined already; return rank and number of ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def network() -> torch.nn.Sequential:
    """Create a network that is the same on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    )


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's samples and targets of a step."""
    generator = torch.Generator().manual_seed(step * 100 + rank)
    x = torch.rand(32, 8, generator=generator)
    return x, x.sum(1, keepdim=True)


def backward(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Fill in the gradients of this rank's batch."""
    model.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()


def average(model: torch.nn.Module) -> None:
    """Average the gradients over the ranks."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
