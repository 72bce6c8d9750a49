"""Handles as real DTensors in actors, and DTensors of actors as handles: the same memory, in order."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from monarch_kernel import heal_mesh
from monarch_kernel.actor import Actor, ActorError, current_rank, endpoint
from monarch_kernel.distributed import Mesh, adopt, distribute, module_to_mesh, offer
from monarch_kernel.tensor import DeviceMeshError, MixedTensorsError, RemoteException, fetch_shard, remote


class Worker(Actor):
    """Works on real DTensors."""

    @endpoint
    def look(self, t: Any) -> Any:
        mesh = t.device_mesh
        whole = float(t.full_tensor().sum())
        return type(t).__name__, tuple(t.shape), tuple(t.placements), mesh.mesh_dim_names, tuple(mesh.shape), whole

    @endpoint
    def add(self, t: Any, number: float) -> None:
        t.add_(number)

    @endpoint
    def twice(self, t: Any) -> Any:
        self.result = t * 2
        return {"twice": offer(self.result)}

    @endpoint
    def thrice(self, t: Any) -> Any:
        return {"whole": t * 3, "name": "thrice"}

    @endpoint
    def own_rank(self, t: Any) -> Any:
        return torch.ones(2)

    @endpoint
    def zero(self) -> None:
        self.result.zero_()

    @endpoint
    def total(self) -> float:
        return float(self.result.full_tensor().sum())

    @endpoint
    def rows(self, counts: list[int]) -> Any:
        rank = current_rank().rank
        return offer(torch.full((counts[rank], 2), float(rank)))

    @endpoint
    def on(self, mesh: Any) -> Any:
        return offer(DTensor.from_local(torch.full((2, 3), mesh.get_rank() // 2 + 1.0), mesh, [Shard(0), Replicate()]))

    @endpoint
    def step(self, model: Any, x: Any) -> Any:
        """A training step in torch alone."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [type(p).__name__ for p in model.parameters()], float(loss.full_tensor())

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def mesh(four: Any) -> Mesh:
    return Mesh.of(four, ("data", "model"), (2, 2))


@pytest.fixture(scope="module")
def workers(four: Any) -> Any:
    return four.spawn("workers", Worker)


def test_a_handle_is_the_real_tensor_in_an_actor(mesh: Mesh, workers: Any) -> None:
    x = distribute(torch.arange(10.0).reshape(5, 2), mesh, ["data", "model"])
    x += 1  # the call comes behind it
    for looked in workers.look.call(x).get().values():
        assert looked == ("DTensor", (5, 2), (Shard(0), Shard(1)), ("data", "model"), (2, 2), 55.0)
    workers.add.call(x, number=1).get()
    assert (x * 2).sum().item() == 130


def test_what_actors_offer_becomes_a_handle(mesh: Mesh, workers: Any) -> None:
    x = distribute(torch.ones(5, 2), mesh, ["data", "model"])
    y = adopt(workers.twice.call(x).get())["twice"]
    assert y.device_mesh is mesh and y.placements == (Shard(0), Shard(1))
    torch.testing.assert_close((x + y).full_tensor(), torch.full((5, 2), 3.0))
    workers.zero.call().get()  # the same memory
    assert y.full_tensor().sum() == 0
    y += 1
    y.sum().item()
    assert set(workers.total.call().get().values()) == {10.0}


def test_a_reference_is_to_the_dtensor(mesh: Mesh, workers: Any, four: Any) -> None:
    x = distribute(torch.ones(5, 2), mesh, ["data", "model"])
    for _ in range(2):  # the second time, the shapes are known
        made = workers.thrice.rref(x)
        x += 1  # behind the call
        assert made["name"] == "thrice"
        assert (made["whole"] - 3 * x).full_tensor().sum() == -30
    with pytest.raises(RemoteException, match="gave a Tensor: a reference to a tensor in parts is to a DTensor"):
        workers.own_rank.rref(x).sum().item()


def test_gradients_pass_an_adopted_leaf(mesh: Mesh, workers: Any) -> None:
    weight: Any = adopt(workers.on.call(mesh).get(), mesh).requires_grad_()
    (weight * weight).sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), weight.detach().full_tensor() * 2)
    assert weight.detach().full_tensor()[:, 0].tolist() == [1, 1, 2, 2]


def test_parts_and_tensors_of_each_rank(mesh: Mesh, workers: Any, four: Any) -> None:
    parts = adopt(workers.rows.call([2, 2, 1, 1]).get(), mesh, ["data", None])
    assert parts.shape == (3, 2) and parts.full_tensor()[:, 0].tolist()[2] == 2
    own = adopt(workers.rows.call([1] * 4).get(), four)
    assert fetch_shard(own * 2, gpus=3).get().tolist() == [[6, 6]]
    with pytest.raises(ValueError, match=r"rank 1 offered OfferedTensor\(\[2, 2\].* adopt\(values, mesh, sharding"):
        adopt(workers.rows.call([1, 2, 1, 2]).get(), four)
    with pytest.raises(ValueError, match=r"rank 0 offered .*\[4, 2\] laid out as .* it should be \[2, 2\]"):
        adopt(workers.rows.call([1, 1, 3, 3]).get(), mesh, ["data"])
    with pytest.raises(TypeError, match="say how they are parts of one"):
        adopt(workers.rows.call([1] * 4).get(), mesh)


def test_mistakes_are_told(mesh: Mesh, workers: Any) -> None:
    offered = workers.on.call(mesh).get()
    with pytest.raises(ValueError, match="ranks 2-3 offered nothing: call all of them"):
        adopt(workers.slice(gpus=slice(0, 2)).on.call(mesh).get())
    adopt(offered)
    with pytest.raises(RuntimeError, match="adopted already"):
        adopt(offered)
    with pytest.raises(TypeError, match="rank 0 gave a float: endpoints and cells give offer"):
        adopt(workers.total.call().get())
    with pytest.raises(TypeError, match="give no sharding_spec"):
        adopt(workers.on.call(mesh).get(), mesh, ["data"])
    other = Mesh.of(mesh.procs.slice(data=0))
    with pytest.raises(MixedTensorsError, match="not all on its ranks"):
        workers.on.call(other)
    with pytest.raises(TypeError, match=r"offer\(int\): only dense"):
        offer(1)  # type: ignore[arg-type]
    broken = remote(lambda t: t[99], propagate=lambda t: t)
    with pytest.raises(ActorError, match="99"):
        workers.add.call(broken(distribute(torch.ones(4), mesh)), 1).get()


def test_a_module_trains_in_actors(mesh: Mesh, workers: Any) -> None:
    torch.manual_seed(0)
    local = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    model = module_to_mesh(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)), mesh, "shard")
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), local.parameters()):
            ours.copy_(theirs)
    x = torch.randn(8, 6)
    loss = local(x).pow(2).mean()
    loss.backward()
    torch.optim.SGD(local.parameters(), lr=0.5).step()
    for kinds, found in workers.step.call(model, x).get().values():
        assert kinds == ["DTensor"] * 4 and found == pytest.approx(loss.item(), abs=1e-6)
    ours: Any
    for ours, theirs in zip(model.parameters(), local.parameters()):
        torch.testing.assert_close(ours.detach().full_tensor(), theirs.detach())


def test_collectives_of_actors_and_of_operations_do_not_meet(mesh: Mesh, workers: Any) -> None:
    line = Mesh.of(mesh.procs, ("all",), (4,))
    x = distribute(torch.ones(4, 4), line, ["all"])
    calls: list[Any] = []
    y: Any = x
    for _ in range(20):  # both sides gather at once, in no order
        calls.append(workers.look.call(x))
        y = (x @ x).redistribute(None)  # type: ignore[attr-defined]  # of a handle
    assert all(v[-1] == 16 for call in calls for v in call.get().values())
    assert y.full_tensor().sum() == 64


@pytest.mark.own_runtime
def test_device_meshes_of_actors_go_on_after_a_death() -> None:
    with Mesh((2,), ("data",)) as mesh:
        workers = mesh.procs.spawn("workers", Worker)
        x = mesh.distribute(torch.ones(4), ["data"])
        y = adopt(workers.twice.call(x).get())["twice"]
        os.kill(workers.slice(data=1).pid.call_one().get(), signal.SIGKILL)
        with pytest.raises(DeviceMeshError):
            while True:  # until the death is seen
                y.sum().item()
        heal_mesh(mesh)
        again = mesh.procs.spawn("again", Worker)
        z = mesh.distribute(torch.ones(4), ["data"])
        assert {v[-1] for v in again.look.call(z).get().values()} == {4.0}
