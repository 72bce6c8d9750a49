"""Training on four real ranks equals training in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from monarch_kernel.distributed import Mesh, module_to_mesh
from monarch_kernel.tensor import Tensor

PLANS: dict[str, Any] = {
    "data": None,
    "fsdp": "shard",
    "tensor": {"0.weight": ["model", None], "0.bias": ["model"], "2.weight": [None, "model"]},
    "2-D": {"0.weight": ["model", "data"], "0.bias": ["model"], "2.weight": ["data", "model"], "4.*": ["data"]},
}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
}


@pytest.fixture(scope="module")
def mesh(runtime: None) -> Iterator[Mesh]:
    with Mesh((2, 2), ("data", "model")) as made:
        yield made


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7), nn.GELU(), nn.Linear(7, 3))


def batches(count: int = 4, rows: int = 7) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Seven rows: they do not divide by the number of ranks."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)) for _ in range(count)
    ]


def train(model: nn.Module, optimizer: optim.Optimizer, place: Any = None) -> list[torch.Tensor]:
    """The losses, and then the parameters."""
    losses: list[torch.Tensor] = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.MSELoss()(model(x), y if place is None else place(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses + [p.detach() for p in model.parameters()]


def here(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [v.full_tensor() if isinstance(v, Tensor) else v for v in values]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
def test_training_equals_one_process(mesh: Mesh, plan: str, optimizer: str) -> None:
    local = network()
    expected = train(local, OPTIMIZERS[optimizer](local.parameters()))
    model = module_to_mesh(network(), mesh, PLANS[plan])
    got = here(train(model, OPTIMIZERS[optimizer](model.parameters()), lambda y: mesh.distribute(y, ["data"])))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_gradients_have_the_layouts_of_their_parameters(mesh: Mesh) -> None:
    model = module_to_mesh(network(), mesh, PLANS["2-D"])
    for x, y in batches(2):  # they accumulate
        nn.MSELoss()(model(x), y).backward()
    local = network()
    for x, y in batches(2):
        nn.MSELoss()(local(x), y).backward()
    for ours, theirs in zip(model.parameters(), local.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert ours.grad.placements == ours.detach().placements  # type: ignore[attr-defined]  # of a handle
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-6)  # type: ignore[attr-defined]
    local_norm = nn.utils.clip_grad_norm_(local.parameters(), 0.1)
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.1).item() == pytest.approx(local_norm.item(), abs=1e-6)


@pytest.mark.filterwarnings("ignore:.*has no rule for the layout")
def test_shared_parameters_stay_shared_and_buffers_follow(mesh: Mesh) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.embed = nn.Embedding(8, 4)
            self.norm = nn.BatchNorm1d(4)
            self.out = nn.Linear(4, 8, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: Any) -> Any:
            return self.out(self.norm(self.embed(x)))

    tokens, wanted = torch.arange(6) % 8, (torch.arange(6) + 1) % 8

    def losses(model: nn.Module) -> list[torch.Tensor]:
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        found: list[torch.Tensor] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens), wanted)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return found + list(model.buffers())

    expected = losses(Tied())
    model = module_to_mesh(Tied(), mesh)
    assert len(list(model.parameters())) == 3
    for ours, theirs in zip(here(losses(model)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_mistakes_in_plans_are_told_at_once(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"no parameter is called '5\.weight': there are 0\.weight"):
        module_to_mesh(network(), mesh, {"5.weight": ["model"]})
    with pytest.raises(ValueError, match="plan='shards'"):
        module_to_mesh(network(), mesh, "shards")
    with pytest.raises(ValueError, match="data='rows': mesh .* has data, model"):
        module_to_mesh(network(), mesh, data="rows")
    with pytest.raises(TypeError, match="give a torch.nn.Module"):
        module_to_mesh(torch.ones(2), mesh)  # type: ignore[arg-type]  # that is the mistake
