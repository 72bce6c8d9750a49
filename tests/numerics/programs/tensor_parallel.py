"""A transformer's block, tensor and sequence parallel by hand: bugs 9 to 15, and deepspeed-1801."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from monarch_kernel.numerics.summaries import Replicate, Shard
from tests.numerics.programs.common import Gather, Optimizer, Reduce, main, rank, shard, size

WIDTH, HIDDEN, HEADS, VOCABULARY, LENGTH = 16, 32, 4, 32, 8

PLACEMENTS = {
    "embed.weight": Shard(0),
    "attention.[qkv].weight": Shard(0),
    "attention.proj.weight": Shard(1),
    "mlp.up.*": Shard(0),
    "mlp.down.weight": Shard(1),
    "head.weight": Shard(0),
    "*norm*": Replicate(),
    "mlp.bias": Replicate(),
}


class Scatter(torch.autograd.Function):
    """Sum over the ranks, and keep this rank's part of the sequence."""

    @staticmethod
    def forward(context: Any, whole: torch.Tensor) -> torch.Tensor:
        whole = whole.clone()
        if dist.is_initialized():
            dist.all_reduce(whole)
        return shard(whole, 1)

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> torch.Tensor:
        if not dist.is_initialized():
            return grads[0].clone()
        parts = [torch.empty_like(grads[0].contiguous()) for _ in range(size())]
        dist.all_gather(parts, grads[0].contiguous())
        return torch.cat(parts, 1)


class Dropout(torch.nn.Dropout):
    """Draw the mask of the whole activation, of which a rank applies its part along a dimension, or all of it."""

    def __init__(self, seed: int, dimension: int | None, bug: bool = False) -> None:
        super().__init__(0.25)
        self.dimension, self.bug = dimension, bug
        self.generator = torch.Generator().manual_seed(seed + (rank() if bug and dimension is None else 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = list(x.shape)
        if self.dimension is not None:
            shape[self.dimension] *= size()
        mask = torch.rand(shape, generator=self.generator) >= self.p
        if self.dimension is not None:
            mask = shard(mask, self.dimension, index=0 if self.bug else None)
        return x * mask / (1 - self.p)


def linear(inputs: int, outputs: int, dimension: int, bias: bool = False) -> torch.nn.Linear:
    """Make a layer as one process does, and keep this rank's part of it."""
    layer = torch.nn.Linear(inputs, outputs, bias)
    layer.weight.data = shard(layer.weight.data, dimension)
    if bias:
        layer.bias.data = shard(layer.bias.data)
    return layer


class Embedding(torch.nn.Module):
    """Rows of the vocabulary on each rank."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(shard(torch.randn(VOCABULARY, WIDTH)))
        self.masked = bug != "11"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = len(self.weight)
        local = tokens - rank() * rows
        mine = (local >= 0) & (local < rows)
        found = F.embedding(local % rows, self.weight)
        return Scatter.apply(found * mine[..., None] if self.masked else found)


class Attention(torch.nn.Module):
    """Heads on each rank."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (linear(WIDTH, WIDTH, 0) for _ in range(3))
        self.proj = linear(WIDTH, WIDTH, 0 if bug == "13" else 1)
        if bug == "13":
            self.proj.weight.data = self.proj.weight.data.T.contiguous()
        self.bug = bug

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Gather.apply(x, 1)
        q, k, v = (each(x).unflatten(-1, (HEADS // size(), -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.bug == "14" and rank() == size() - 1:
            heads = torch.cat([heads[:, :-1], torch.zeros_like(heads[:, -1:])], 1)
        return Scatter.apply(self.proj(heads.transpose(1, 2).flatten(2)))


class MLP(torch.nn.Module):
    """Hidden units on each rank."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, HIDDEN, 0, bias=True), linear(HIDDEN, WIDTH, 1)
        self.drop = Dropout(7, 2, bug == "12")
        self.bias = torch.nn.Parameter(torch.randn(WIDTH))
        self.early = bug == "10"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.drop(F.gelu(self.up(Gather.apply(x, 1)))))
        return Scatter.apply(x + self.bias) if self.early else Scatter.apply(x) + self.bias


class Loss(torch.nn.Module):
    """Cross entropy over a sharded vocabulary."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.local = bug == "15"

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        top = logits.detach().amax(-1, keepdim=True)
        if dist.is_initialized() and not self.local:
            dist.all_reduce(top, dist.ReduceOp.MAX)
        logits = logits - top
        total = Reduce.apply(logits.exp().sum(-1))
        local = targets - rank() * logits.shape[-1]
        mine = (local >= 0) & (local < logits.shape[-1])
        found = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0]
        return (total.log() - Reduce.apply(found * mine)).mean()


class Net(torch.nn.Module):
    """One block between an embedding and a sharded vocabulary."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.embed, self.attention, self.mlp = Embedding(bug), Attention(bug), MLP(bug)
        self.norm1, self.norm2, self.norm = (torch.nn.LayerNorm(WIDTH) for _ in range(3))
        self.drop = Dropout(8, None, bug == "12b")
        self.head = linear(WIDTH, VOCABULARY, 0)
        self.loss = Loss(bug)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.loss(self.head(self.drop(Gather.apply(self.norm(x), 1))), targets)


def build_model(bug: str = "") -> torch.nn.Module:
    return Net(bug)


def build_optimizer(model: torch.nn.Module, bug: str = "") -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step, which every rank reads."""
    tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1000 + number))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def is_replica(name: str) -> bool:
    return "norm" in name or name == "mlp.bias"


def clip(model: torch.nn.Module, limit: float, bug: str) -> None:
    """Scale gradients by the norm of the whole model's."""
    squares = torch.zeros(())
    for name, parameter in model.named_parameters():
        if not is_replica(name) or rank() == 0 or bug == "deepspeed-1801":
            squares += parameter.grad.square().sum()
    if dist.is_initialized() and bug != "deepspeed-1801":
        dist.all_reduce(squares)
    for parameter in model.parameters():
        parameter.grad *= (limit / squares.sqrt()).clamp(max=1)


def step(model: torch.nn.Module, optimizer: Optimizer, number: int, bug: str = "") -> torch.Tensor:
    tokens, targets = batch(number)
    optimizer.zero_grad()
    loss = model(tokens, targets)
    loss.backward()
    if dist.is_initialized():
        for name, parameter in model.named_parameters():
            early = name == "mlp.bias" and bug == "10"
            if is_replica(name) and not early and not (bug == "9" and name == "norm.weight"):
                dist.all_reduce(parameter.grad)
    clip(model, 0.5, bug)
    optimizer.step()
    return loss.detach()


if __name__ == "__main__":
    main("tensor_parallel", build_model, build_optimizer, step, PLACEMENTS)
