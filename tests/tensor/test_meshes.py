"""Tensors that move to other ranks: to_mesh, slice_mesh, and meshes of other worlds."""

from __future__ import annotations

import itertools
import os
import warnings
from typing import Any

import pytest
import torch

from monarch_kernel.actor import Actor, endpoint, this_host
from monarch_kernel.tensor import (
    DeviceMeshError,
    MixedTensorsError,
    RanksDifferWarning,
    RemoteException,
    call_on_shard_and_fetch,
    get_active_mesh,
    inspect,
    remote,
)


@pytest.fixture(scope="module")
def grid(runtime: None) -> Any:
    """Four ranks in two dimensions."""
    return this_host().spawn_procs(per_host={"hosts": 2, "gpus": 2}, name="grid")


def values(mesh: Any, tensor: Any) -> list[Any]:
    """The first number on each rank."""
    extent = mesh.extent
    places = itertools.product(*map(range, extent.shape))
    return [inspect(tensor, dict(zip(extent.names, at)))[0].item() for at in places]


def test_to_parts_of_the_mesh(grid: Any) -> None:
    left, right = grid.slice(gpus=0), grid.slice(gpus=1)
    with grid.activate():
        x = torch.arange(3.0) + grid.rank_tensor("gpus") + 10 * grid.rank_tensor("hosts")
        here = x.slice_mesh(gpus=0)
        there = here.to_mesh(right)
        back = here.to_mesh(grid)  # a broadcast along gpus
        same = x.to_mesh(grid)
    assert here.mesh.extent == left.extent
    assert values(right, there) == [0, 10]
    with left.activate():
        moved = (there.to_mesh(left) + here) * 2
        with pytest.raises(MixedTensorsError, match="to_mesh"):
            here + there
    assert values(left, moved) == [0, 40]
    assert values(grid, back) == [0, 0, 10, 10] and values(grid, same) == [0, 1, 10, 11]
    with pytest.raises(ValueError, match="hosts=2.*no dimension"):
        x.to_mesh(grid.slice(hosts=0))


def test_a_value_taken_for_that_of_all_says_once_whose_it_is(grid: Any) -> None:
    with grid.activate(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same = torch.arange(200_000.0)
        loss = grid.rank_tensor("gpus") * 1.0
        for _ in range(3):
            assert loss.item() == 0
        assert [*same.numpy()[:2]] == [0, 1] and same[7].item() == 7 and inspect(loss, gpus=1).item() == 1
        assert not (same * float("nan")).isfinite().any().item()
        assert (same * float("nan"))[:2].numpy().size == 2
        rows = same + 1e6 * grid.rank_tensor("hosts")
        assert float(rows[0]) == 0 and rows.numpy()[0] == 0 and loss.tolist() == 0
    said = [(str(each.message).partition(" fetch_shard")[0], each.lineno, each.filename) for each in caught]
    first = test_a_value_taken_for_that_of_all_says_once_whose_it_is.__code__.co_firstlineno
    assert said == [
        (
            "item() gives the value of hosts=0,gpus=0: hosts=0-1,gpus=1 of mesh grid hold other values.",
            first + 6,
            __file__,
        ),
        (
            "item() gives the value of hosts=0,gpus=0: hosts=1,gpus=0-1 of mesh grid hold other values.",
            first + 11,
            __file__,
        ),
    ]
    assert "fetch_shard(t, hosts=0, gpus=1).result() takes another one" in str(caught[0].message)
    assert {each.category for each in caught} == {RanksDifferWarning}


def test_an_index_is_that_of_each_rank(grid: Any) -> None:
    """Torch takes an index without dimensions as one number; all ranks had that of the first."""
    base = torch.arange(24.0).reshape(4, 3, 2)
    with grid.activate():
        number = grid.rank_tensor("gpus") + 2 * grid.rank_tensor("hosts")
        t = torch.arange(24.0).reshape(4, 3, 2).requires_grad_()
        found = [
            t[number],
            t[1:, number - 1],
            t[..., number - 4 * (number > 1), 0],
            t[None, number, ..., 1],
            t[-1 - number],
        ]
        t[number].sum().backward()
        written = torch.zeros(4, 2)
        written[number] = 7.0
        written[-1 - number] += 1.0
    for rank, (host, gpu) in enumerate(itertools.product(range(2), range(2))):
        at = rank - 4 * (rank > 1)
        right = [base[rank], base[1:, rank - 1], base[..., at, 0], base[None, rank, ..., 1], base[-1 - rank]]
        for here, there in zip(right, found, strict=True):
            assert torch.equal(here, inspect(there, hosts=host, gpus=gpu))
        assert inspect(t.grad, hosts=host, gpus=gpu).sum(dim=(1, 2)).tolist() == [6.0 * (k == rank) for k in range(4)]
        rows = [8.0 if k == rank == 3 - rank else 7.0 * (k == rank) + 1.0 * (k == 3 - rank) for k in range(4)]
        assert inspect(written, hosts=host, gpus=gpu)[:, 0].tolist() == rows


def test_a_row_of_stages(grid: Any) -> None:
    stages = [grid.slice(gpus=k) for k in range(2)]
    with stages[0].activate():
        x = torch.ones(40_000)
    for _ in range(3):
        for stage in stages:
            x = x.to_mesh(stage)
            with stage.activate():
                x = x * 2
    assert inspect(x, hosts=1)[0] == 64


def test_a_failure_moves_like_a_value(grid: Any) -> None:
    broken = remote(lambda t: t / 0 if int(t[0]) else t[99], propagate=lambda t: t)
    with grid.activate():
        x = broken(torch.ones(2, dtype=torch.int64) * grid.rank_tensor("gpus"))
        y = x.slice_mesh(gpus=0).to_mesh(grid.slice(gpus=1))
    with pytest.raises(RemoteException, match="index 99"):
        inspect(y)


def test_to_the_mesh_of_another_world(grid: Any) -> None:
    other = this_host().spawn_procs(per_host={"hosts": 2}, name="other")
    try:
        with grid.activate():
            x = torch.arange(5.0) * (1 + grid.rank_tensor("hosts"))
            total = x.reduce("gpus", "sum", mesh=other)
        y = x.slice_mesh(gpus=1).to_mesh(other)
        with other.activate():
            z = y + 1 + total
        assert [inspect(z, hosts=k).tolist() for k in range(2)] == [[1, 4, 7, 10, 13], [1, 7, 13, 19, 25]]
        assert inspect(y.to_mesh(grid), hosts=1, gpus=0).tolist() == [0, 2, 4, 6, 8]
    finally:
        other.stop("its test is over").get()


def test_the_active_mesh_tells_where_ranks_are(grid: Any) -> None:
    with grid.activate():
        mesh = get_active_mesh()
        assert mesh.names == ("hosts", "gpus") and mesh.size() == 4 and mesh.size("gpus") == 2
        place = mesh.rank(("hosts", "gpus"))
        assert [int(inspect(place, hosts=h, gpus=g)) for h in (0, 1) for g in (0, 1)] == [0, 1, 2, 3]
        assert inspect(mesh.rank(["gpus", "hosts"]), hosts=0, gpus=1) == 2
        assert {name: int(x) for name, x in inspect(mesh.ranks, hosts=1, gpus=0).items()} == {"hosts": 1, "gpus": 0}
        assert list(mesh.ranks) == ["hosts", "gpus"] and "gpus" in mesh.ranks and "racks" not in mesh.ranks
        last = {"hosts": 1, "gpus": 1}
        assert call_on_shard_and_fetch(lambda ranks: sum(ranks.values()), mesh.ranks, shard=last).get() == 2
        assert mesh.coordinates(2) == {"hosts": 1, "gpus": 0}
        assert mesh.process_group(("hosts", "gpus")).size() == 4
        part = mesh(hosts=1)
        assert part.names == ("gpus",) and values(part, torch.ones(1).slice_mesh(hosts=1) * part.rank("gpus")) == [0, 1]
        for wrong, kind in ((lambda: mesh(hosts=2), IndexError), (lambda: mesh.rank("racks"), KeyError)):
            with pytest.raises(kind):
                wrong()
        with pytest.raises(IndexError):
            mesh.coordinates(4)


def test_tensors_end_and_processes_live(runtime: None) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="ended")
    with procs.activate():
        x = torch.ones(2)
        y = x + 1
        get_active_mesh().exit()
        for use in (lambda: x + 1, lambda: inspect(y), lambda: torch.ones(1)):
            with pytest.raises(DeviceMeshError, match=r"exit\(\) has ended its tensors"):
                use()
    with pytest.raises(DeviceMeshError, match="spawn other processes"), procs.slice(gpus=0).activate():
        pass
    assert procs.spawn("here", Here).pid.call().get().sizes == {"gpus": 2}
    procs.stop("its test is over").get()


class Here(Actor):
    """Answers."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()
