"""What programs do with tensors in parts beside operations: copies, conversions, checkpointing, mistakes, replays."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

from monarch_kernel import heal_mesh
from monarch_kernel.actor import Actor, context, endpoint
from monarch_kernel.distributed import Mesh, module_to_mesh
from monarch_kernel.runtime.tensor.controller.stream import MAIN
from monarch_kernel.tensor import (
    DeviceMeshError,
    MixedTensorsError,
    NonFiniteError,
    RemoteException,
    compile,  # noqa: A004  # Monarch's name
    memory,
    watch_nan,
)

BASE = torch.arange(20.0).reshape(5, 4)


@pytest.fixture(scope="module")
def mesh(runtime: None) -> Mesh:
    return Mesh(2, "data")


@pytest.fixture
def x(mesh: Mesh) -> Any:
    return mesh.distribute(BASE, ["data"])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def deep_copy(module: nn.Module) -> Any:
    return copy.deepcopy(module)


# -- copies and conversions -------------------------------------------------------------------------


def test_deep_copies_are_tensors_of_their_own(mesh: Mesh, x: Any) -> None:
    other = copy.deepcopy(x)
    other += 1
    assert (other - x).full_tensor().sum() == 20
    model = module_to_mesh(nn.Linear(4, 2), mesh, "shard")
    twin = deep_copy(model)
    twin(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is None and twin.weight.grad.placements == twin.weight.detach().placements
    assert twin.weight.grad.full_tensor().tolist() == [[2.0] * 4] * 2
    assert isinstance(twin.weight, nn.Parameter)
    average = optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert average(torch.ones(2, 4)).shape == (2, 2)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(twin.weight * 2)


def test_modules_are_converted_in_place(mesh: Mesh) -> None:
    model: Any = module_to_mesh(nn.Linear(4, 2), mesh, "shard").to("cuda").double()
    assert model(torch.ones(3, 4).double()).full_tensor().dtype == torch.float64
    assert model.weight.to("cpu").dtype == torch.float64 and model.weight.cuda().shape == (2, 4)
    half = model.bfloat16()(torch.ones(3, 4).bfloat16()).full_tensor()
    assert half.dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"t\.data = \.\.\.: a local tensor \[2, 4\] is not on mesh"):
        model.weight.data = torch.ones(2, 4)


def test_state_dicts_of_this_process_are_loaded(mesh: Mesh) -> None:
    model: Any = module_to_mesh(nn.Linear(100, 100), mesh, "shard")
    state = {name: value.full_tensor() + 1 for name, value in model.state_dict().items()}
    assert not model.load_state_dict(state).missing_keys
    torch.testing.assert_close(model.weight.detach().full_tensor(), state["weight"])
    assert model.weight.detach().to_local().shape == (50, 100)


def test_mistakes_say_what_to_write(mesh: Mesh, x: Any) -> None:
    with pytest.raises(RuntimeError, match=r"more than one value is ambiguous.*use any\(\) or all\(\)"):
        bool(x)
    with pytest.raises(RuntimeError, match="no values"):
        bool(x[:0])
    for save in (pickle.dumps, lambda t: torch.save({"w": t}, io.BytesIO())):
        with pytest.raises(TypeError, match=r"save_checkpoint\(\)"):
            save(x)
    with pytest.raises(RuntimeError, match="is on its ranks"):
        x.share_memory_()
    with pytest.raises(BufferError, match="full_tensor"):
        torch.from_dlpack(x)
    with pytest.raises(TypeError, match="a part of the ranks has not all of it"):
        x.slice_mesh(data=0)
    with pytest.raises(IndexError, match="data=5 is out of range"):
        x.to_local(data=5)


def test_a_closed_mesh_is_told_as_such(mesh: Mesh, x: Any) -> None:
    with Mesh(1, name="other") as other:
        y = other.distribute(torch.ones(5, 4))
        with pytest.raises(MixedTensorsError, match=r"distribute\(t.full_tensor\(\), mesh"):
            _ = x + y
    with pytest.raises(DeviceMeshError, match="mesh other was stopped, and its tensors are gone"):
        y.sum().item()
    assert "1 tensors on ranks" in repr(memory(x))  # tools go on without it


def test_a_line_deep_in_modules_is_told(mesh: Mesh, x: Any) -> None:
    class Deep(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.inner = (
                Deep(depth - 1) if depth else nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(Breaks()))))
            )

        def forward(self, t: Any) -> Any:
            return self.inner(t)

    class Breaks(nn.Module):
        def forward(self, t: Any) -> Any:
            return nn.functional.embedding(t.long() + 100, t)

    for depth in (0, 8):
        with pytest.raises(RemoteException, match=r"return nn.functional.embedding|in forward"):
            Deep(depth)(x).sum().item()


# -- random numbers ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*has no rule for the layout")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_numbers_again(mesh: Mesh, reentrant: bool) -> None:
    def gradients(place: Callable[[Any], Any], model: Any) -> list[Any]:
        torch.manual_seed(5)
        inputs, _ = data()
        first = place(inputs).requires_grad_()
        once = checkpoint(model, first, use_reentrant=reentrant)
        twice = checkpoint(model, nn.functional.dropout(once, 0.5), use_reentrant=reentrant)
        twice.square().sum().backward()
        after = nn.functional.dropout(first.detach(), 0.5)
        return [first.grad, after, *(p.grad for p in model.parameters())]

    def module() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    expected = gradients(lambda t: t, module())
    got = gradients(lambda t: mesh.distribute(t, ["data"]), module_to_mesh(module(), mesh, "shard"))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=0, atol=1e-5)


def test_a_replay_draws_what_a_seed_says(mesh: Mesh) -> None:
    dropped = compile(lambda t: nn.functional.dropout(t, 0.5))
    for seed in range(5):
        torch.manual_seed(seed)
        got = dropped(mesh.distribute(torch.ones(5, 4), ["data"])).full_tensor()
        torch.manual_seed(seed)
        torch.testing.assert_close(got, nn.functional.dropout(torch.ones(5, 4), 0.5))
    assert dropped.replayed >= 3


# -- replays and failures ---------------------------------------------------------------------------


def test_a_failure_that_was_told_is_no_failure_of_the_next_batch(mesh: Mesh) -> None:
    model = module_to_mesh(network(), mesh)
    tokens, table = mesh.distribute(torch.tensor([0, 1, 99, 99]), ["data"]), mesh.distribute(torch.randn(10, 4))
    with pytest.raises(RemoteException, match="index out of range"):
        nn.functional.embedding(tokens, table).sum().item()
    assert mesh.execute(model, data()[0]).shape == (6, 2)

    def poisons(batch: Any) -> None:
        table.add_(nn.functional.embedding(tokens, table).sum())

    for _ in range(2):  # the second time, of what the first has left behind
        with pytest.raises(RemoteException, match="index out of range"):
            mesh.execute(poisons, None)


@pytest.mark.filterwarnings("ignore:.*has no rule for the layout")
def test_a_watch_sees_what_has_no_known_shape(mesh: Mesh) -> None:
    places = mesh.distribute(torch.tensor([0, 0, 1, 1]), ["data"])
    with watch_nan():
        assert torch.bincount(places, mesh.distribute(torch.ones(4), ["data"])).sum().item() == 4
    with watch_nan(), pytest.raises(NonFiniteError, match=r"bincount made 1 Inf.*\nof int64 \[4\]; float32 \[4\]"):
        torch.bincount(places, mesh.distribute(torch.tensor([3e38, 3e38, 1, 1]), ["data"]))


class Killable(Actor):
    """Tells what to kill."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def _abort() -> None:
    context().actor_instance.abort("a test")


@pytest.mark.own_runtime
@pytest.mark.parametrize("dies", ["process", "worker"])
def test_a_replayed_training_goes_on_after_a_heal(dies: str) -> None:
    batch = data()

    def train(model: nn.Module, run: Any, wrap: Any = lambda f: f) -> list[float]:
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)

        @wrap
        def step(batch: Any) -> Any:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return loss.detach()

        return [float(run(step, k)) for k in range(9)]

    expected = train(network(), lambda step, _: step(batch))
    mesh = Mesh(2, "data")
    steps: list[Any] = []

    def run(step: Any, number: int) -> Any:
        nonlocal mesh
        steps.append(step)
        if number == 5 and dies == "process":
            os.kill(mesh.procs.slice(data=1).spawn("k", Killable).pid.call_one().get(), signal.SIGKILL)
        elif number == 5:
            workers = MAIN.workers_of(mesh._target.engine).slice(ranks=1)
            with pytest.raises(Exception, match="a test"):
                workers.ask.call(b"", b"", 0, cloudpickle.dumps(_abort), []).get()
        try:
            return mesh.execute(step, batch)
        except DeviceMeshError:
            mesh = heal_mesh(mesh)
            return mesh.execute(step, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = train(module_to_mesh(network(), mesh, "shard"), run, compile)
    mesh.close()
    assert got == pytest.approx(expected, abs=1e-6)
    assert steps[0].replayed >= 5
