"""Training programs for captures and replays: one for each form of parallelism, the same on ranks and in a replay."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional


def meet() -> tuple[int, int]:
    """Join the process group, as a script does; the rank and the number of ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def batch(step: int, rank: int, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Another batch in each step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, width, generator=generator), torch.randint(0, 3, (4,), generator=generator)


class Net(nn.Module):
    """Layers with state that steps change: dropout draws, batch norm counts."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Logits of 3 classes."""
        return self.second(self.drop(functional.relu(self.norm(self.first(x))))) * scale


def ddp(steps: int, fail_at: int = -1, nan_at: int = -1, edit: str = "") -> list[float]:
    """Data-parallel, with two micro-batches a step, clipping, and a loss that is summed over ranks for the log."""
    rank, _ = meet()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.0005)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    losses: list[float] = []
    for step in range(steps):
        for micro in range(2):
            x, y = batch(10 * step + micro, rank)
            if step == fail_at and micro == 1:
                y = y + 7  # no such class
            if step == nan_at:
                x = x * float("inf")
            with model.no_sync() if micro == 0 and edit != "sync" else torch.enable_grad():
                loss = functional.cross_entropy(model(x, scale=0.5), y % 3 if edit == "mend" else y) / 2
                loss.backward()
        shown = loss.detach().clone()
        if edit != "no log":
            dist.all_reduce(shown, op=dist.ReduceOp.MAX if edit == "max" else dist.ReduceOp.SUM)
        losses.append(shown.item())
        if edit == "scale":
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(2.0)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if edit == "count":
            print("a step has ended")
    return losses


def shared_count(steps: int) -> None:
    """Data-parallel, with the loss over the number of tokens on all ranks, which is counted before the forward."""
    rank, _ = meet()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        x, y = batch(step, rank)
        count = torch.tensor(float(len(x) + 3 * step + rank))
        dist.all_reduce(count)
        number = count.item()  # before the forward, so that the loss reads no tensor
        loss = functional.cross_entropy(model(x, scale=0.5), y, reduction="sum") / number
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp(steps: int) -> None:
    """FSDP2, each layer for itself and the rest."""
    from torch.distributed.fsdp import fully_shard

    rank, size = meet()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,))
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Linear(16, 3))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        x, y = batch(step, rank)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def tensor_parallel(steps: int) -> None:
    """Columns and rows of two layers over the ranks, the norm replicated."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    _, size = meet()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,))
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(step, 0)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def pipeline(steps: int, schedule: str = "1f1b") -> None:
    """A stage on each rank, four micro-batches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, size = meet()
    torch.manual_seed(rank)
    parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(size - 1)] + [nn.Linear(8, 3)]
    module = parts[rank]
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    made = Schedule1F1B if schedule == "1f1b" else ScheduleGPipe
    plan = made(stage, n_microbatches=4, loss_fn=functional.cross_entropy)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for step in range(steps):
        x, y = batch(step, 0)
        if rank == 0:
            plan.step(x)
        elif rank == size - 1:
            plan.step(target=y)
        else:
            plan.step()
        optimizer.step()
        optimizer.zero_grad()


@dataclass
class Batch:
    """Tokens, and those that follow."""

    tokens: torch.Tensor
    following: torch.Tensor


@dataclass
class Output:
    """What a model of a library returns."""

    loss: torch.Tensor
    logits: torch.Tensor


class Tied(nn.Module):
    """Embedding and output share a weight; a buffer averages; the loss is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.embedding.weight = self.output.weight
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, batch: Batch, *, mask: torch.Tensor) -> Output:
        """The loss and the logits."""
        hidden = self.embedding(batch.tokens)
        self.mean.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
        logits = self.output(functional.dropout(hidden, 0.2) * mask + self.mean)
        return Output(functional.cross_entropy(logits.flatten(0, 1), batch.following.flatten()), logits)


def nested(steps: int) -> None:
    """A model that takes and returns data classes, and a learning rate that changes."""
    torch.manual_seed(1)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        drawn = [torch.randint(0, 10, (2, 3), generator=generator) for _ in range(2)]
        model(Batch(*drawn), mask=torch.rand(2, 3, 1, generator=generator)).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def parts(steps: int) -> None:
    """A program that calls the parts of its model itself, and whose loss reads the batch once more."""
    torch.manual_seed(1)
    encoder, decoder, criterion = nn.Linear(8, 3), nn.Linear(3, 8), nn.MSELoss()
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1, momentum=0.9)
    for step in range(steps):
        x, _ = batch(step, 0)
        weight = torch.tensor(float(step + 1))
        hidden = encoder(x)
        loss = criterion(decoder(hidden.relu()), x) * weight + 0.1 * (hidden**2).mean() + (x - 1).abs().mean() * 0.1
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 0.5)
        optimizer.step()


def mixed(steps: int) -> None:
    """Mixed precision with a scaled loss, and a compiled model."""
    torch.manual_seed(1)
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), backend="eager")
    optimizer, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu")
    for step in range(steps):
        x, y = batch(step, 0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class Optimizers(torch.optim.Optimizer):
    """One optimizer for several, as some programs make."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        super().__init__([each for one in optimizers for group in one.param_groups for each in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all of them."""
        for each in self.optimizers:
            each.step(closure)


def contained(steps: int) -> None:
    """An optimizer that steps two others."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = Optimizers(*(torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model[0], model[2])))
    for step in range(steps):
        x, y = batch(step, 0)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.zero_grad()


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    globals()[sys.argv[1]](int(sys.argv[2]))
    print("the program went on", os.environ["RANK"])
