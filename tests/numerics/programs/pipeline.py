"""Two stages with tied first and last weights, by hand: bugs 19 to 21."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from tests.numerics.programs.common import Optimizer, main, rank, size

WIDTH, VOCABULARY, MICRO_BATCHES = 16, 32, 4


class Head(torch.nn.Module):
    """Logits by the weight of the embedding."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.T


class Stage(torch.nn.Module):
    """The layers of this rank; one process alone has all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.is_first, self.is_last = rank() == 0, rank() == size() - 1
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        layers = {str(each): torch.nn.Linear(WIDTH, WIDTH) for each in range(4)}
        mine = [str(each) for each in range(4) if each * size() // 4 == rank()]
        self.layers = torch.nn.ModuleDict({each: layers[each] for each in mine})
        self.norm = torch.nn.LayerNorm(WIDTH) if self.is_last else None
        self.head = Head() if self.is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.embed(x)
        for layer in self.layers.values():
            x = x + layer(x).relu()
        return self.head(self.norm(x), self.embed.weight) if self.head and self.norm else x


def build_model(bug: str = "") -> torch.nn.Module:
    return Stage()


def build_optimizer(model: torch.nn.Module, bug: str = "") -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step."""
    tokens = torch.randint(VOCABULARY, (8, 9), generator=torch.Generator().manual_seed(1000 + number))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def step(model: torch.nn.Module, optimizer: Optimizer, number: int, bug: str = "") -> torch.Tensor:
    inputs, targets = (each.chunk(MICRO_BATCHES) for each in batch(number))
    optimizer.zero_grad()
    total = torch.zeros(())
    for micro in range(MICRO_BATCHES):
        chosen = 1 if bug == "20" and micro == 2 else micro
        if model.is_first:
            received = inputs[chosen]
        else:
            received = torch.empty(*inputs[chosen].shape, WIDTH, requires_grad=True)
            dist.recv(received.data, rank() - 1)
        outputs = model(received)
        if model.is_last:
            loss = F.cross_entropy(outputs.flatten(0, 1), targets[chosen].flatten())
            loss = loss if bug == "21" else loss / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        else:
            dist.send(outputs.detach(), rank() + 1)
            grad = torch.empty_like(outputs)
            dist.recv(grad, rank() + 1)
            outputs.backward(grad)
        if not model.is_first:
            dist.send(received.grad, rank() - 1)
    if dist.is_initialized() and bug != "19":
        dist.all_reduce(model.embed.weight.grad)
    optimizer.step()
    return total


if __name__ == "__main__":
    main("pipeline", build_model, build_optimizer, step)
