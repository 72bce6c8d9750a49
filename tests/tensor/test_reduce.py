"""Collectives over values on the ranks, against the same on stacked local tensors."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import pytest
import torch

from monarch_kernel.actor import this_host
from monarch_kernel.tensor import DeviceMeshError, RemoteException, Tensor, inspect, no_mesh, remote

KINDS = ["stack", "sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
BITS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


@pytest.fixture(scope="module")
def grid(runtime: None) -> Any:
    """Four ranks in two dimensions."""
    return this_host().spawn_procs(per_host={"hosts": 2, "gpus": 2}, name="grid")


def numbers(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    """What a rank has."""
    count = torch.Size(shape).numel()
    made = (torch.arange(count) * (2 * rank + 3) + rank).remainder(7)
    return (made > 3 if dtype == torch.bool else made.to(dtype)).reshape(shape)


def on_ranks(mesh: Any, dtype: torch.dtype, shape: tuple[int, ...] = (2, 3)) -> Any:
    """A handle of them."""
    rank = mesh.rank_tensor("hosts") * 2 + mesh.rank_tensor("gpus")
    made = (torch.arange(torch.Size(shape).numel()) * (2 * rank + 3) + rank).remainder(7)
    return (made > 3 if dtype == torch.bool else made.to(dtype)).reshape(shape)


def combined(stacked: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "stack":
        return stacked
    if kind in BITS:
        return functools.reduce(BITS[kind], stacked)
    local = {"sum": torch.sum, "avg": torch.mean, "product": torch.prod, "min": torch.amin, "max": torch.amax}[kind]
    return local(stacked.float() if kind == "product" else stacked, 0).to(stacked.dtype)


def allowed(kind: str, dtype: torch.dtype) -> bool:
    if kind in BITS:
        return not dtype.is_floating_point
    return not (kind == "avg" and not dtype.is_floating_point) and not (kind == "sum" and dtype == torch.bool)


def group(dims: Any, rank: int) -> list[int]:
    host, gpu = divmod(rank, 2)
    return {"hosts": [gpu, 2 + gpu], "gpus": [2 * host, 2 * host + 1]}.get(dims, [0, 1, 2, 3])


@pytest.mark.parametrize("dims", ["hosts", "gpus", None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool], ids=str)
def test_every_reduction(grid: Any, dims: Any, dtype: torch.dtype) -> None:
    with grid.activate():
        for kind in KINDS:
            count = 2 if dims else 4
            whole, parts = on_ranks(grid, dtype), on_ranks(grid, dtype, (count, 3))
            if not allowed(kind, dtype):
                with pytest.raises(TypeError, match=kind):
                    whole.reduce(dims, kind)
                continue
            got = [whole.reduce(dims, kind), parts.reduce(dims, kind, scatter=True)]
            for rank in range(4):
                everywhere, part = inspect(got, hosts=rank // 2, gpus=rank % 2)
                members = group(dims, rank)
                mine = members.index(rank)
                with no_mesh.activate():
                    expected = combined(torch.stack([numbers(r, dtype) for r in members]), kind)
                    rows = torch.stack([numbers(r, dtype, (count, 3))[mine] for r in members])
                    assert torch.equal(everywhere, expected), (kind, rank)
                    assert torch.equal(part, combined(rows, kind)), (kind, rank)


@pytest.mark.parametrize("size", [8, 40_000])  # a mark beside the data, and a collective of its own
def test_in_place_and_out(grid: Any, size: int) -> None:
    with grid.activate():
        x = torch.ones(4, size) * grid.rank_tensor("gpus")
        assert x.reduce_("gpus", "sum") is x
        rows = torch.zeros(size, 4).t()  # not contiguous
        assert rows.reduce_("hosts", "max") is rows
        out = torch.empty(2, 4, size)
        assert x.reduce("hosts", "stack", out=out) is out
        part = torch.empty(size)
        x.reduce(None, "avg", scatter=True, out=part)
        x.reduce(None, "stack", scatter=True, out=x)
        with pytest.raises(ValueError, match="shape"):
            x.reduce("hosts", "stack", out=x)
    got = inspect([x, rows, out, part], gpus=1)
    assert all(bool((t == 1).all()) for t in (got[0], *got[2:])) and not got[1].any()


@pytest.mark.parametrize("size", [1, 70_000])
def test_results_on_a_part_of_the_mesh(grid: Any, size: int) -> None:
    first = grid.slice(gpus=0)
    with grid.activate():
        x = torch.ones(size) * (grid.rank_tensor("gpus") + 10 * grid.rank_tensor("hosts"))
        total = x.reduce("gpus", "sum", mesh=first)
        values = x.reduce("gpus", "stack", mesh=first)
        both = x.reduce("hosts", "sum", mesh=first)
        assert isinstance(total, Tensor) and total.mesh.extent == first.extent
    with first.activate():
        doubled = total * 2 + both
    assert inspect(doubled, hosts=1)[0] == 2 * 21 + 10
    assert inspect(values, hosts=1)[:, 0].tolist() == [10, 11]


def test_slices_reduce_among_themselves(grid: Any) -> None:
    column = grid.slice(gpus=1)
    with column.activate():
        x = torch.ones(2) * column.rank_tensor("hosts")
        assert inspect(x.reduce("hosts", "stack"), hosts=0).tolist() == [[0, 0], [1, 1]]
        with pytest.raises(KeyError, match="gpus"):
            x.reduce("gpus")
    with grid.activate():
        with pytest.raises(TypeError, match="dimension 0"):
            torch.ones(3).reduce("gpus", scatter=True)
        with pytest.raises(ValueError, match="mean"):
            torch.ones(3).reduce("gpus", "mean")


@pytest.mark.parametrize("size", [2, 50_000])
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("kind", ["stack", "sum", "product", "bxor"])
def test_a_rank_whose_input_failed_takes_part(grid: Any, kind: str, scatter: bool, size: int) -> None:
    @remote(propagate=lambda t: t)
    def picky(t: Any) -> Any:
        if int(t.reshape(-1)[0]) == 3:
            raise ValueError("three is not allowed \udcff")
        return t

    with grid.activate():
        rank = grid.rank_tensor("gpus") + 2 * grid.rank_tensor("hosts")
        x = picky(torch.ones(4, size, dtype=torch.int64) * rank)
        total = x.reduce(None, kind, scatter)  # nobody waits for rank 3
        with pytest.raises(RemoteException, match="three is not allowed") as failed:
            inspect(total * 2)
        assert failed.value.rank == 3 and "x = picky" in failed.value.controller_frames
        first = grid.slice(hosts=0)
        alone = (torch.ones(4, size, dtype=torch.int64) * rank).reduce("gpus", "sum")
        assert inspect(alone, hosts=1)[0, 0] == 5
        with pytest.raises(RemoteException, match="three is not allowed"):  # also where only healthy ranks are asked
            inspect(x.reduce(None, "sum", mesh=first))


def test_a_rank_that_fails_in_a_collective_frees_the_others(grid: Any) -> None:
    def meet(t: Any) -> Any:
        from monarch_kernel.runtime.tensor.rank import groups
        from monarch_kernel.runtime.tensor.rank.current_executor import here

        with groups.group_block():
            if here().rank == 2:
                raise OSError("rank 2 fails before it meets the others")
            group = groups.group_of(0, (0, 1, 2, 3))
            torch.distributed.all_reduce(t, group=group)
        return t

    together = remote(meet, propagate=lambda t: t)
    with grid.activate():
        torch.ones(1).reduce()
        with pytest.raises(RemoteException) as failed:
            inspect(together(torch.ones(3)))
        assert failed.value.rank == 2 and "fails before it meets" in str(failed.value)
        assert inspect(torch.ones(2).reduce()).tolist() == [4, 4]  # groups are formed anew


@pytest.mark.own_runtime
def test_a_dead_rank_frees_the_others() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 3}, name="three")

    def die(t: Any) -> Any:
        from monarch_kernel.runtime.tensor.rank.current_executor import here

        if here().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return t

    with procs.activate():
        torch.ones(1).reduce()
        total = remote(die, propagate=lambda t: t)(torch.ones(50_000)).reduce()
        with pytest.raises(DeviceMeshError, match="heal_mesh"):
            inspect(total)
        with pytest.raises(DeviceMeshError):
            torch.ones(2).reduce("gpus", "max")
    part = procs.slice(gpus=slice(0, 3, 2))  # those that live no longer wait
    with part.activate():
        assert inspect(torch.ones(2), gpus=1)[0] == 1
