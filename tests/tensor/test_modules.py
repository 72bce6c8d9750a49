"""Modules that are built and sharded on the ranks: FSDP2, tensor parallel, stages of a pipeline."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn, optim

from monarch_kernel.actor import ActorError
from monarch_kernel.distributed import Mesh, RemoteModule
from monarch_kernel.runtime.tensor.rank.current_executor import here
from tests.conftest import wait_until


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def with_fsdp(device_mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model[0], mesh=device_mesh)
    return fully_shard(model, mesh=device_mesh)


def with_tensor_parallel(device_mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(network(), device_mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def with_both(device_mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(with_tensor_parallel(device_mesh), mesh=device_mesh["data"])


def like(x: Any) -> Any:
    return x.new_empty(x.shape[0], 3)


def train(model: nn.Module) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    losses: list[torch.Tensor] = []
    for _ in range(4):
        x, y = torch.randn(6, 6, generator=generator), torch.randn(6, 3, generator=generator)
        optimizer.zero_grad()
        loss = nn.MSELoss()(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


@pytest.fixture(scope="module")
def mesh(four: Any) -> Mesh:
    return Mesh.of(four, ("data", "model"), (2, 2))


@pytest.mark.filterwarnings("ignore:.*has no rule for the layout")
@pytest.mark.parametrize("build", [with_fsdp, with_tensor_parallel, with_both])
def test_training_equals_one_process(four: Any, mesh: Mesh, build: Any) -> None:
    on = Mesh.of(four) if build is with_fsdp else mesh
    model = RemoteModule(on, build, like)
    assert [name for name, _ in model.named_parameters()] == ["0__weight", "0__bias", "2__weight", "2__bias"]
    assert train(model) == pytest.approx(train(network()), abs=1e-6)


def test_an_optimizer_lives_on_the_ranks_too(four: Any) -> None:
    model = RemoteModule(Mesh.of(four), with_fsdp, like)

    def begin(module: nn.Module) -> None:
        module.optimizer = optim.SGD(module.parameters(), lr=0.1)  # type: ignore[assignment]  # no module

    model.on_ranks(begin)
    shapes = model.on_ranks(lambda module: [tuple(p.to_local().shape) for p in module.parameters()])
    assert shapes[0] == [(3, 6), (3,), (1, 12), (1,)]


def test_stages_of_a_pipeline(four: Any) -> None:
    """Two halves of the ranks, each with one layer; activations and their gradients go from mesh to mesh."""
    halves = [Mesh.of(four.slice(gpus=part)) for part in (slice(0, 2), slice(2, 4))]
    first = RemoteModule(halves[0], lambda _: nn.Sequential(*network()[:2]), lambda x: x.new_empty(x.shape[0], 12))
    second = RemoteModule(halves[1], lambda _: network()[2], like)

    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Any) -> Any:
            parts = [first(part) for part in x.split(3)]  # micro-batches
            return torch.cat([second(part.full_tensor()) for part in parts])

    assert train(Stages()) == pytest.approx(train(network()), abs=1e-6)


def test_modules_and_passes_leave_nothing(four: Any) -> None:
    mesh = Mesh.of(four)
    target = mesh._target

    def kept() -> tuple[int, int]:
        def count() -> tuple[int, int]:
            store = here().store
            return len(store.values), len(store.extras.get("modules", {}))

        return max(target.engine.ask(target, count))

    gc.collect()
    before = kept()
    model = RemoteModule(mesh, with_fsdp, like)
    for _ in range(3):
        model(torch.ones(4, 6))  # without a backward pass
    del model
    gc.collect()
    wait_until(lambda: kept() <= before, "the end of the module on the ranks")


def test_a_module_that_cannot_be_built(four: Any) -> None:
    def build(_: Any) -> Any:
        raise ValueError("no such layer")

    with pytest.raises(ActorError, match="no such layer"):
        RemoteModule(Mesh.of(four), build, like)
    with pytest.raises(ValueError, match="data='rows'"):
        RemoteModule(Mesh.of(four), with_fsdp, like, data="rows")
