"""What the programs share: their arguments, the process group, and differentiable collectives."""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Optimizer = torch.optim.Optimizer
BuildModel = Callable[[str], torch.nn.Module]
BuildOptimizer = Callable[[torch.nn.Module, str], Optimizer]
Step = Callable[[torch.nn.Module, Optimizer, int, str], torch.Tensor]


def rank() -> int:
    """Return the rank of this process, 0 in the reference."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Return the number of ranks, 1 in the reference."""
    return dist.get_world_size() if dist.is_initialized() else 1


def shard(whole: torch.Tensor, dimension: int = 0, index: int | None = None, of: int | None = None) -> torch.Tensor:
    """Return this rank's part of a tensor along a dimension (of a size that the ranks divide)."""
    of = size() if of is None else of
    return whole.chunk(of, dimension)[rank() if index is None else index].clone()


class Reduce(torch.autograd.Function):
    """Sum over a group in forward, and the identity in backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        value = value.clone()
        if dist.is_initialized():
            dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class Copy(torch.autograd.Function):
    """The identity in forward, and a sum over a group in backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        context.group = group
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].clone()
        if dist.is_initialized():
            dist.all_reduce(grad, group=context.group)
        return grad, None


class Gather(torch.autograd.Function):
    """Concatenate the parts of a group's ranks along a dimension; backward sums, and returns this rank's part."""

    @staticmethod
    def forward(
        context: Any, part: torch.Tensor, dimension: int, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        context.dimension, context.group = dimension, group
        if not dist.is_initialized():
            return part.view_as(part)
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dimension)

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grads[0].clone()
        if dist.is_initialized():
            dist.all_reduce(grad, group=context.group)
            parts = grad.chunk(dist.get_world_size(context.group), context.dimension)
            grad = parts[dist.get_rank(context.group)].contiguous()
        return grad, None, None


def begin(
    build_model: BuildModel, build_optimizer: BuildOptimizer, bug: str, seed: int = 0
) -> tuple[torch.nn.Module, Optimizer]:
    """Build a program's model and optimizer from equal seeds, and leave random generators that differ by rank."""
    torch.manual_seed(seed)
    model = build_model(bug)
    optimizer = build_optimizer(model, bug)
    torch.manual_seed(100 + rank())
    return model, optimizer


def main(
    program: str,
    build_model: BuildModel,
    build_optimizer: BuildOptimizer,
    step: Step,
    placements: dict[str, Any] | None = None,
) -> None:
    """Train: ``PROGRAM [GATE] [--bug N] [--steps K] [--rules RULES --every N --stop] [--record NAME]``.

    Args:
        program: its name.
        build_model: makes this rank's model, or the whole model in one process.
        build_optimizer: makes its optimizer.
        step: trains once on the batch of that number, and returns the loss.
        placements: how parameters that are plain tensors lie on ranks, by patterns of their names.

    With GATE, a file, it trains until the file is there.
    """
    parser = argparse.ArgumentParser(program)
    parser.add_argument("gate", nargs="?", type=Path)
    parser.add_argument("--bug", default="")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rules", help="the rules to check, with commas between, or all")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--record", help="record all steps in this folder, with all tensors")
    parser.add_argument("--perturb", type=int, default=0, help="move inputs of the recorded run by so many units")
    found = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model, optimizer = begin(build_model, build_optimizer, found.bug)
    with ExitStack() as stack:
        if found.record:
            from monarch_kernel.numerics import record

            folder = Path(found.record)
            options = {"full": True, "perturb": found.perturb, "placements": placements, "folder": folder}
            stack.enter_context(record(folder.name, model, optimizer, steps=found.steps, **options))
        if found.rules:
            from monarch_kernel.numerics.rules import rules

            names = None if found.rules == "all" else found.rules.split(",")
            stack.enter_context(rules(names, every=found.every, stop=found.stop, placements=placements))
        _train(found, model, optimizer, step)
    if dist.is_initialized():
        dist.barrier()
        # A DistributedDataParallel that is freed later, as the last owner of the group, may wait for a thread of gloo
        # that waits for the interpreter lock.
        del model, optimizer
        gc.collect()
        dist.destroy_process_group()


def _train(found: argparse.Namespace, model: torch.nn.Module, optimizer: Optimizer, step: Step) -> None:
    number = 0
    loss = ends = torch.zeros(1)
    while number < found.steps or (found.gate is not None and not ends):
        loss = step(model, optimizer, number, found.bug)
        if number < 3:
            print(f"rank {rank()} step {number}: loss {loss.item():.6f}", flush=True)
        number += 1
        if found.gate is not None and dist.is_initialized():
            ends = torch.full((1,), float(found.gate.exists()))
            dist.all_reduce(ends, dist.ReduceOp.MAX)
            time.sleep(0.02)  # tests look at it while it trains: it leaves them the cores
    print(f"rank {rank()} ends after {number} steps, loss {loss.item():.6f}", flush=True)
