"""New tensors on sharded meshes: `zeros`, `randn` and the like, the active mesh, meshes of three dimensions."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from monarch_kernel import distributed
from monarch_kernel.distributed import Mesh, distribute
from monarch_kernel.tensor import Tensor, no_mesh, remote
from tests.waiting import patience


@pytest.fixture(scope="module")
def mesh(runtime: None) -> Iterator[Mesh]:
    """Two by two ranks."""
    with Mesh(shape=(2, 2), mesh_dim_names=("data", "model")) as made:
        yield made


SPECS = [None, ["data"], ["model", "data"], [("data", "model")], [Replicate(), Shard(1)]]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_values_and_parts_are_those_of_one_device(mesh: Mesh, spec: Any) -> None:
    def all_of(make: Any, **where: Any) -> list[Any]:
        torch.manual_seed(11)
        return [
            make.zeros(7, 5, dtype=torch.int32, **where),
            make.ones((7, 5), **where),
            make.full((7, 5), 2.5, **where),
            make.full([7, 5], True, **where),
            make.randn(7, 5, **where),
            make.rand(7, 5, dtype=torch.float64, **where),
            make.randn(3, 5, dtype=torch.bfloat16, **where),
        ]

    wanted = all_of(torch)
    for got, expected in zip(all_of(distributed, mesh=mesh, sharding_spec=spec), wanted, strict=True):
        assert type(got) is Tensor and got.dtype == expected.dtype and got.stride() == expected.stride()
        assert torch.equal(got.full_tensor(), expected)
        like = distribute(expected, mesh, spec)
        assert got.placements == like.placements
        for at in ({}, {"data": 1}, {"data": 1, "model": 1}):
            assert torch.equal(got.to_local(**at), like.to_local(**at))
    shape = distributed.empty(7, 5, mesh=mesh, sharding_spec=spec, dtype=torch.int8)
    assert shape.shape == (7, 5) and shape.full_tensor().dtype == torch.int8


@pytest.mark.parametrize("size", [(2**21 + 5,), (40, 70_000)])
def test_large_random_tensors_are_drawn_in_pieces_and_are_the_same(mesh: Mesh, size: tuple[int, ...]) -> None:
    where: dict[str, Any] = {
        "mesh": mesh,
        "sharding_spec": [("model", "data")] if len(size) == 1 else ["data", "model"],
    }
    torch.manual_seed(5)
    got = [distributed.randn(*size, **where), distributed.rand(*size, **where), distributed.rand(3, mesh=mesh)]
    torch.manual_seed(5)
    for made, expected in zip(got, (torch.randn(size), torch.rand(size), torch.rand(3)), strict=True):
        assert torch.equal(made.full_tensor(), expected)


def test_counting_scalars_and_empty_tensors(mesh: Mesh) -> None:
    for bounds in ((5,), (2, 9, 3), (0.0, 1.0, 0.1), (10, 0, -4)):
        got = distributed.arange(*bounds, mesh=mesh, sharding_spec=["data"])
        assert torch.equal(got.full_tensor(), torch.arange(*bounds)) and got.placements[0] == Shard(0)
    assert distributed.full((), 3, mesh=mesh).item() == 3
    assert distributed.zeros(0, 4, mesh=mesh, sharding_spec=["data"]).full_tensor().shape == (0, 4)
    assert torch.equal(
        distributed.randn(1, mesh=mesh, sharding_spec=["data"]).full_tensor().isnan(), torch.tensor([False])
    )


def test_they_are_used_as_any_tensor(mesh: Mesh) -> None:
    torch.manual_seed(2)
    w = distributed.randn(5, 3, mesh=mesh, placements=[Replicate(), Shard(0)], requires_grad=True)
    x = distributed.ones(8, 5, device_mesh=mesh, sharding_spec=["data", None])
    ((x @ w) ** 2).mean().backward()
    torch.manual_seed(2)
    v = torch.randn(5, 3, requires_grad=True)
    ((torch.ones(8, 5) @ v) ** 2).mean().backward()
    assert w.is_leaf and w.grad is not None
    torch.testing.assert_close(w.grad.full_tensor(), v.grad)  # type: ignore[attr-defined]


def test_the_active_mesh_is_theirs_and_torchs(mesh: Mesh) -> None:
    with mesh.activate():
        torch.manual_seed(4)
        parts = distributed.zeros(4, 2, sharding_spec=["data"])
        noise, steps, values = torch.randn(3, 2), torch.arange(0, 1, 0.25), torch.tensor([1.0, 2.0])
        layer = torch.nn.Linear(2, 2)
        out = layer(parts + values)
        with no_mesh.activate():
            assert type(torch.zeros(2)) is torch.Tensor
            with pytest.raises(ValueError, match=r"zeros\(\).*mesh=\.\.\."):
                distributed.zeros(2)
    assert type(torch.zeros(2)) is torch.Tensor
    torch.manual_seed(4)
    assert torch.equal(noise.full_tensor(), torch.randn(3, 2))  # type: ignore[attr-defined]
    assert torch.equal(steps.full_tensor(), torch.arange(0, 1, 0.25))  # type: ignore[attr-defined]
    local = torch.nn.Linear(2, 2)
    torch.testing.assert_close(out.full_tensor(), local(torch.zeros(4, 2) + torch.tensor([1.0, 2.0])))
    assert parts.placements[0] == Shard(0) and noise.placements[0] == Replicate()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda m: distributed.zeros(2, sharding_spec=["data"]), ValueError, "no mesh"),
        (lambda m: distributed.zeros(2, mesh=m, device_mesh=m), TypeError, "not both"),
        (lambda m: distributed.zeros(2, mesh=m, out=None), TypeError, "no option 'out'"),
        (lambda m: distributed.zeros(-2, mesh=m), ValueError, "not negative"),
        (lambda m: distributed.zeros(2.5, mesh=m), TypeError, "float"),
        (lambda m: distributed.ones(2, mesh=m, sharding_spec=["pipe"]), ValueError, "no dimension 'pipe'"),
        (lambda m: distributed.ones(2, mesh=m, placements=[Partial(), Partial()]), ValueError, "sum of terms"),
        (lambda m: distributed.randn(2, mesh=m, dtype=torch.int64), TypeError, "floating-point"),
        (lambda m: distributed.rand(2, mesh=m, layout=torch.sparse_coo), TypeError, "dense"),
        (lambda m: distributed.rand(2, mesh=3), TypeError, "no mesh"),
    ],
)
def test_mistakes_are_told_at_once(mesh: Mesh, make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make(mesh)


def test_printing_does_not_wait_for_ranks_that_are_busy(mesh: Mesh, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    @remote(propagate=lambda x: x.clone())
    def hold(x: Any) -> Any:
        with open(gate):  # until the test opens it
            return x

    t, u = (distributed.ones(4, mesh=mesh, sharding_spec=["data"]) for _ in range(2))
    assert repr(t) == "Tensor([4], float32, [Shard(0), Replicate()], mesh=mesh(data=2, model=2))"
    held = hold(t)
    told: list[str] = []
    waits = threading.Thread(target=lambda: told.extend([repr(t), repr(u), str(held), repr(mesh)]))
    waits.start()
    waits.join(patience(30))
    with open(gate, "w"):
        assert torch.equal(held.full_tensor(), torch.ones(4))
    assert len(told) == 4 and "[Shard(0), Replicate()]" in told[0] and "ranks are busy" in told[1]
    assert "[Shard(0), Replicate()]" in repr(u)


def test_meshes_of_three_dimensions_and_of_torch(runtime: None) -> None:
    table = torch.arange(60.0).reshape(5, 4, 3)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        device_mesh = DeviceMesh("cpu", torch.arange(8).view(2, 2, 2), mesh_dim_names=("pipe", "data", "model"))
        t = distribute(table, device_mesh, [("pipe", "data"), "model"])
        u = distributed.ones(5, 4, 3, device_mesh=device_mesh, placements=[Shard(2), Replicate(), Shard(0)])
        owner = t.device_mesh
        assert owner.shape == (2, 2, 2) and owner.mesh_dim_names == ("pipe", "data", "model")
        assert owner is u.device_mesh and owner is distribute(table, mesh=device_mesh).device_mesh
        assert torch.equal(t.to_local(pipe=1, model=1), table[3:4, 2:])  # five rows: 3 and 2, then 2, 1, 1 and 1
        total: Any = t + u
        assert torch.equal(total.full_tensor(), table + 1) and torch.equal(total.sum(2).full_tensor(), table.sum(2) + 3)
        owner.close()
    finally:
        dist.destroy_process_group()
