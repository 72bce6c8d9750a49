"""Recordings of models whose tensors are on the ranks of a mesh, in the process that controls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monarch_kernel.actor import this_host
from monarch_kernel.distributed import Mesh, module_to_mesh
from monarch_kernel.numerics.comparison import compare
from monarch_kernel.numerics.observer import observer
from monarch_kernel.numerics.recording import Recording, record
from monarch_kernel.numerics.reference import compare_with_reference
from monarch_kernel.numerics.rules import CheckedStep, rule, rules
from monarch_kernel.numerics.step_capture import capture
from monarch_kernel.numerics.summaries import Shard, local_of

pytestmark = pytest.mark.torch

TRAIN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x, scale=1.0):
        self.count.add_(1.0)
        return self.two(self.one(x).relu() * scale) * self.table


def fill(model):
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            size = parameter.numel()
            parameter.copy_((torch.arange(size) * (0.37 + at)).sin().reshape(parameter.shape) / 4)
    return model


def build_model():
    return fill(Net())


def batch():
    x = (torch.arange(48.0) * 0.71).cos().reshape(6, 8)
    return x, (torch.arange(24.0) * 0.53).sin().reshape(6, 4)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training program."""
    path = tmp_path_factory.mktemp("program") / "mesh_train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture(scope="module")
def names(program: Path) -> dict[str, Any]:
    """What the program defines."""
    found: dict[str, Any] = {}
    exec(compile(program.read_text(), str(program), "exec"), found)
    return found


@pytest.fixture(scope="module")
def pair(runtime: None) -> Any:
    """Two ranks."""
    return this_host().spawn_procs(per_host={"gpus": 2}, name="pair")


@pytest.fixture(scope="module")
def grid(runtime: None) -> Iterator[Mesh]:
    """Two ranks whose tensors are sharded."""
    with Mesh((2,), ("model",)) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert not observer().is_installed


def train(model: nn.Module, data: tuple[Any, Any], steps: int = 2, **options: Any) -> None:
    """Train with one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(data[0], **options) - data[1]).square().mean().backward()
        optimizer.step()


def recorded(folder: Path, train_it: Callable[[], object], **options: Any) -> Recording:
    """Record two steps."""
    with record(folder.name, folder=folder, steps=2, **options) as recorder:
        train_it()
    assert recorder.reason == "done", recorder.reason
    return Recording.open(folder)


@pytest.fixture(scope="module")
def alone(names: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Two steps of one process."""
    folder = tmp_path_factory.mktemp("alone") / "alone"
    return recorded(folder, lambda: train(names["build_model"](), names["batch"]()))


def test_each_rank_of_an_active_mesh_is_recorded(
    pair: Any, names: dict[str, Any], alone: Recording, tmp_path: Path
) -> None:
    with pair.activate():
        model, data = names["build_model"](), names["batch"]()
        found = recorded(tmp_path / "mesh", lambda: train(model, data))
    assert (found.ranks, found.world_size, found.steps, found.finished, found.notes) == ((0, 1), 2, 2, True, [])
    assert found.header(0)["pid"] != found.header(1)["pid"]

    def kinds(recording: Recording, rank: int) -> list[tuple[str, str, str]]:
        return [(each.kind, each.name, each.tensor) for each in recording.entries(rank) if each.kind != "generator"]

    assert kinds(found, 0) == kinds(found, 1)
    assert sorted(kinds(found, 0)) == sorted(kinds(alone, 0))
    assert {each.name for each in found.entries(1) if each.kind == "generator"} >= {"torch.cpu", "python"}
    counts = [each for each in found.entries(1) if each.kind == "buffer" and each.name == "count"]
    assert [each.maximum for each in counts] == [1.0, 2.0]
    assert len([each for each in found.entries(1) if each.kind == "buffer" and each.name == "table"]) == 1
    output = next(each for each in found.entries(1) if each.kind == "output" and not each.name)
    assert output.shape == (6, 4) and output.line.startswith("test_silent_errors.py:")
    comparison = compare(alone, found)
    assert comparison.equal is True, str(comparison)
    assert comparison.compared > 40


def test_one_wrong_rank_is_named(pair: Any, names: dict[str, Any], alone: Recording, tmp_path: Path) -> None:
    with pair.activate():
        model, data = names["build_model"](), names["batch"]()
        scale = 1.0 + 0.01 * pair.rank_tensor("gpus")
        found = recorded(tmp_path / "mesh", lambda: train(model, data, scale=scale))
    comparison = compare(alone, found)
    first = comparison.first
    assert comparison.equal is False and first is not None, str(comparison)
    assert (first.step, first.phase, first.module, first.ranks) == (0, "forward", "two", (1,))
    assert "1.01 times" in first.suggests


@pytest.mark.parametrize("plan", ["shard", None], ids=["sharded", "replicated"])
def test_sharded_tensors_add_up_to_one_process(
    grid: Mesh, names: dict[str, Any], alone: Recording, tmp_path: Path, plan: Any
) -> None:
    x, y = names["batch"]()
    model = module_to_mesh(names["build_model"](), grid, plan)
    found = recorded(tmp_path / "grid", lambda: train(model, (x, grid.distribute(y, [None]))))
    assert found.ranks == (0, 1)
    if plan:
        part = next(each for each in found.entries(1) if each.kind == "update" and each.name == "one.weight")
        assert (
            part.placement is not None and part.placement.global_shape == (16, 8) and part.placement.offsets == (8, 0)
        )
        assert part.shape == (8, 8)
    comparison = compare(alone, found)
    assert comparison.equal is True, str(comparison)
    assert comparison.compared > 40


def test_plain_tensors_of_ranks_have_placements_by_name(pair: Any, tmp_path: Path) -> None:
    with pair.activate():
        net = nn.Linear(4, 2)
        placements = {"weight": Shard(0), "bias": Shard(0)}
        found = recorded(
            tmp_path / "mesh",
            lambda: train(net, (torch.ones(3, 4), torch.ones(3, 2))),
            placements=placements,
        )
    weights = [each for rank in (0, 1) for each in found.entries(rank) if each.name == "weight" and each.step == 0]
    offsets = {each.rank: each.placement.offsets for each in weights if each.placement is not None}
    assert offsets == {0: (0, 0), 1: (2, 0)}
    assert {each.placement.global_shape for each in weights if each.placement is not None} == {(4, 4)}


def test_kept_tensors_and_perturbed_inputs(pair: Any, program: Path, names: dict[str, Any], tmp_path: Path) -> None:
    with pair.activate():
        data = names["batch"]()
        full = recorded(tmp_path / "full", lambda: train(names["build_model"](), data), full=True)
        moved = recorded(tmp_path / "moved", lambda: train(names["build_model"](), data), perturb=1)
    kept = next(each for each in full.entries(1) if each.kind == "reduced_gradient")
    tensor = full.tensor(kept)
    assert tensor is not None and float(tensor.norm()) == pytest.approx(kept.norm, rel=1e-5)
    comparison = compare(full, moved)
    assert comparison.identical < comparison.compared
    inputs = {each.hash for each in moved.entries() if each.kind == "input" and not each.name and not each.step}
    assert len(inputs) == 1 and inputs.isdisjoint(each.hash for each in full.entries() if each.kind == "input")
    comparison = compare_with_reference(full, f"{program}:build_model")
    assert comparison.equal is True, str(comparison)


@rule
def small_weights(step: CheckedStep) -> Iterator[Any]:
    """A rule of the tests."""
    for each in step.parameters:
        if float(local_of(each.parameter).abs().max()) > 100:
            yield step.broken(each.name, f"a weight of {each.name} exceeds 100")


def test_ranks_keep_rules_on_an_active_mesh(pair: Any, names: dict[str, Any]) -> None:
    with pair.activate():
        model, data = names["build_model"](), names["batch"]()
        with rules(every=2, report=lambda broken: None) as check:
            train(model, data, 6)
        assert check.broken == [] and check.checked == 3
        assert (
            "data" not in check.names and "3 steps checked (replicas, updates, grads, buffers, memory" in check.summary
        )
        with rules(every=1, report=lambda broken: None) as check:
            train(model, data, 2)
            with torch.no_grad():
                model.two.weight += 1000.0 * pair.rank_tensor("gpus")
            train(model, data, 1)
    found = {(each.rule, each.ranks, each.names) for each in check.broken if each.sure}
    assert any(rule == "replicas" and ranks == (1,) and "two.weight" in names for rule, ranks, names in found)
    assert ("small_weights", (1,), ("two.weight",)) in found
    line = next(each.line for each in check.broken if each.rule == "replicas")
    assert line.startswith("test_silent_errors.py:")


def test_a_gradient_that_is_not_finite_on_one_rank_breaks_a_rule(pair: Any, names: dict[str, Any]) -> None:
    with pair.activate():
        model, data = names["build_model"](), names["batch"]()
        with rules("grads", every=1, report=lambda broken: None) as check:
            train(model, data, 1, scale=1.0 / (1.0 - pair.rank_tensor("gpus")))
    assert [(each.rule, each.ranks) for each in check.broken] == [("grads", (1,))]


@pytest.mark.parametrize("plan", ["shard", None], ids=["sharded", "replicated"])
def test_ranks_keep_rules_on_sharded_tensors(grid: Mesh, names: dict[str, Any], plan: Any) -> None:
    x, y = names["batch"]()
    model = module_to_mesh(names["build_model"](), grid, plan)
    with rules(every=1, report=lambda broken: None) as check:
        train(model, (x, grid.distribute(y, [None])), 4)
    assert check.broken == [] and check.checked == 4


def test_what_cannot_work_on_a_mesh_says_what_to_do(pair: Any, names: dict[str, Any], tmp_path: Path) -> None:
    with pair.activate():
        model, data = names["build_model"](), names["batch"]()
        said = "TypeError: the tensors of this model are on mesh pair.*record modules and optimizer"
        with pytest.warns(RuntimeWarning, match=said), record("ops", folder=tmp_path / "ops", what=("modules", "ops")):
            train(model, data)
        with (
            pytest.warns(RuntimeWarning, match="on mesh pair, and a capture has the step of one process"),
            capture("step", folder=tmp_path / "step") as waiting,
        ):
            train(model, data)
        assert waiting.state == "failed" and "run the training on the ranks themselves" in waiting.reason
    assert not list((tmp_path / "step").iterdir())
