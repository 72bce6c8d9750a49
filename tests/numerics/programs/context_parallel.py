"""Chunks of a sequence on two ranks, batches on two pairs of them: bugs 16 to 18."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from tests.numerics.programs.common import Copy, Gather, Optimizer, Reduce, main, rank, shard, size

WIDTH, EXPERTS, VOCABULARY, LENGTH = 16, 4, 32, 8


class Context:
    """The two ranks that share sequences; one process alone has them whole."""

    def __init__(self) -> None:
        self.size = min(2, size())
        self.index = rank() % self.size
        self.batches = size() // self.size
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            groups = [dist.new_group([first, first + 1]) for first in range(0, size(), 2)]
            self.group = groups[rank() // 2]


class Attention(torch.nn.Module):
    """Queries of this rank's chunk, keys and values of all chunks."""

    def __init__(self, context: Context, bug: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.context, self.local = context, bug == "17"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, v = (Gather.apply(each(x), 1, self.context.group) for each in (self.k, self.v))
        first = 0 if self.local else self.context.index * x.shape[1]
        queries = torch.arange(first, first + x.shape[1])
        mask = queries[:, None] >= torch.arange(k.shape[1])
        return F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=mask)


class Position(torch.nn.Module):
    """Learned positions."""

    def __init__(self, context: Context, bug: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.context, self.restarts = context, bug == "16"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = 0 if self.restarts else self.context.index * x.shape[1]
        return x + self.weight[first : first + x.shape[1]]


class Balance(torch.nn.Module):
    """How unevenly all tokens of a step choose experts."""

    def __init__(self, context: Context, bug: str) -> None:
        super().__init__()
        self.group, self.size = (context.group, context.size) if bug == "18" else (None, size())

    def forward(self, choices: torch.Tensor) -> torch.Tensor:
        shares = choices.softmax(-1).mean((0, 1)) / self.size
        shares = Reduce.apply(Copy.apply(shares, self.group), self.group)
        return EXPERTS * shares.square().sum()


class Net(torch.nn.Module):
    """Attention and a gate of experts."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        context = Context()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.position = Position(context, bug)
        self.attention = Attention(context, bug)
        self.gate = torch.nn.Linear(WIDTH, EXPERTS)
        self.experts = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        self.balance = Balance(context, bug)
        self.context = context

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.position(self.embed(tokens))
        x = x + self.attention(x)
        choices = self.gate(x)
        x = x + torch.einsum("bte,btd,edf->btf", choices.softmax(-1), x, self.experts)
        return self.head(x), self.balance(choices)


def build_model(bug: str = "") -> torch.nn.Module:
    return Net(bug)


def build_optimizer(model: torch.nn.Module, bug: str = "") -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step."""
    tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1000 + number))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def step(model: torch.nn.Module, optimizer: Optimizer, number: int, bug: str = "") -> torch.Tensor:
    context: Context = model.context  # type: ignore[assignment]
    tokens, targets = (
        shard(shard(each, 0, rank() // context.size, context.batches), 1, context.index, context.size)
        for each in batch(number)
    )
    optimizer.zero_grad()
    logits, balance = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.1 * balance
    loss.backward()
    if dist.is_initialized():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size()
    optimizer.step()
    return loss.detach()


if __name__ == "__main__":
    main("context_parallel", build_model, build_optimizer, step)
