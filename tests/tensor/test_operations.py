"""Torch operations while a mesh is active: handles here, values on every rank."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

from monarch_kernel.tensor import (
    MixedTensorsError,
    RemoteException,
    Tensor,
    call_on_shard_and_fetch,
    fetch_shard,
    get_active_mesh,
    inspect,
    no_mesh,
    rank_tensors,
    remote,
)
from tests.conftest import wait_until


def engine(mesh: Any) -> Any:
    return mesh._shared["tensors"]


def test_floats_that_decide_a_size_and_those_that_do_not(four: Any) -> None:
    with four.activate():
        for end in (3.0, 5.0, 3.0):
            assert fetch_shard(torch.arange(end)).result().tolist() == list(range(int(end)))
        assert fetch_shard(torch.arange(0.0, 1.0, 0.25)).result().tolist() == [0.0, 0.25, 0.5, 0.75]
        for factor in (2.0, 3.0):
            assert fetch_shard(torch.ones(1) * factor).result().tolist() == [factor]


def test_a_number_that_is_known_here_is_forgotten_when_it_is_written(four: Any) -> None:
    with four.activate():
        x = torch.tensor(3.0)
        assert x.item() == 3.0
        x.zero_()
        assert x.item() == 0.0


def test_operations_run_on_every_rank(four: Any) -> None:
    with four.activate():
        rank = four.rank_tensor("gpus")
        x = torch.arange(6).reshape(2, 3) * (rank + 1)
        assert isinstance(x, Tensor) and x.shape == (2, 3) and x.dtype == torch.int64
        for k in range(4):
            assert fetch_shard(x, gpus=k).result().tolist() == [
                [0, k + 1, 2 * k + 2],
                [3 * k + 3, 4 * k + 4, 5 * k + 5],
            ]
    assert inspect({"a": [x, 1]}, {"gpus": 2})["a"][1] == 1
    assert inspect(rank_tensors(four), gpus=3)["gpus"] == 3


def test_views_share_memory_on_ranks(four: Any) -> None:
    with four.activate():
        base = torch.zeros(4, 4)
        base[1:3, ::2].add_(torch.ones(2, 2))
        rows = base.split(2)
        rows[1].mul_(10)
    local = torch.zeros(4, 4)
    local[1:3, ::2].add_(torch.ones(2, 2))
    local[2:].mul_(10)
    assert torch.equal(inspect(base), local)


def test_a_step_of_training_equals_a_local_one(four: Any) -> None:
    def train() -> Any:
        x = torch.linspace(0, 1, 12).reshape(4, 3)
        w = torch.linspace(-1, 1, 6).reshape(3, 2).requires_grad_()
        b = torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.AdamW([w, b], lr=0.1)
        for _ in range(3):
            loss = torch.nn.functional.mse_loss(torch.relu(x @ w + b), torch.ones(4, 2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return w.detach(), b.detach(), loss.detach()

    with four.activate():
        got = inspect(train(), gpus=3)
    for ours, local in zip(got, train(), strict=True):
        assert torch.allclose(ours, local, atol=1e-6)


def test_values_where_the_program_needs_them(four: Any) -> None:
    with four.activate():
        x = torch.tensor([3.0, -1.0, 0.0])
        assert x[0].item() == 3.0 and bool(x[0] > 2) and float(x.sum()) == 2.0
        assert x.tolist() == [3.0, -1.0, 0.0]
        assert (x != 0).nonzero().shape == (2, 1)
        assert inspect(x[x > 0]).tolist() == [3.0]
        local = inspect(x)
        assert (local + 1).sum() == 5.0 and not isinstance(local + 1, Tensor)  # fetched values are local ones
    assert engine(four).plan.lines


def test_shapes_that_differ_between_ranks_have_no_handle(four: Any) -> None:
    with four.activate():
        x = torch.arange(4)
        with pytest.raises(ValueError, match=r"nonzero.*another shape on rank 1"):
            torch.nonzero(x < four.rank_tensor("gpus"))
        assert call_on_shard_and_fetch(lambda t: t.tolist(), x, shard={"gpus": 1}).get() == [0, 1, 2, 3]
        assert torch.equal(x, x + 0) is True and torch.allclose(x, x + 1) is False
        with pytest.raises(ValueError, match=r"equal.*another value on rank 1 \(False\) than on rank 0 \(True\)"):
            torch.equal(x, x + four.rank_tensor("gpus"))


def test_mistakes_are_told_at_once(four: Any) -> None:
    local = torch.ones(3)
    with four.activate():
        x = torch.ones(3)
        with pytest.raises(RuntimeError, match="size"):
            x @ torch.ones(4)
        for mix in (
            lambda: x + local,
            lambda: local + x,
            lambda: local / x,
            lambda: local == x,
            lambda: x < local,
            lambda: local.add_(x),
            lambda: torch.nn.Parameter(local) - x,
            lambda: torch.add(x, local),
        ):
            with pytest.raises(MixedTensorsError, match=r"^\w+: a local tensor \[3\]") as mixed:
                mix()
            assert isinstance(mixed.value, TypeError)
        with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for \+: 'Tensor' and 'str'"):
            x + "not a number"
        assert 1 - x is not None and (x == "other") is False
        with pytest.raises(IndexError, match="gpus=4"):
            fetch_shard(x, gpus=4)
        with pytest.raises(KeyError, match="no dimension 'hosts'"):
            fetch_shard(x, hosts=0)
        with pytest.raises(TypeError, match="in place"):
            torch.ones(1, 3).squeeze_(0)
        with no_mesh.activate():
            assert not isinstance(torch.ones(2), Tensor)
        assert get_active_mesh() is four
    with pytest.raises(ValueError, match="no device mesh is active"):
        get_active_mesh()
    with pytest.raises(TypeError, match="pickled"):
        __import__("pickle").dumps(x)


def test_a_failed_operation_is_told_with_both_tracebacks(four: Any) -> None:
    @remote(propagate=lambda t: t)
    def picky(t: Any) -> Any:
        if int(t[0]) == 2:
            raise ValueError("two is not allowed")
        return t

    with four.activate():
        x = torch.ones(2) * four.rank_tensor("gpus")
        y = picky(x)
        z = y * 2 + x
        with pytest.raises(RemoteException) as failed:
            inspect(z)  # of rank 0, where it went well
        assert failed.value.rank == 2
        assert "two is not allowed" in failed.value.worker_error_string
        assert "y = picky(x)" in failed.value.controller_frames
        assert inspect(x, gpus=2).tolist() == [2.0, 2.0]  # the mesh lives


def test_strict_operations_fail_at_their_line(four: Any) -> None:
    broken = remote(lambda: 1 / 0)
    with four.activate():
        torch.ones(1)
        engine(four).strict = True
        try:
            with pytest.raises(RemoteException, match="division by zero"):
                broken()
            assert inspect(torch.ones(1)).item() == 1.0
        finally:
            engine(four).strict = False


def test_slices_and_their_slices(four: Any) -> None:
    part = four.slice(gpus=slice(1, 3))
    with four.activate():
        whole = torch.ones(2)
        with part.activate():
            x = torch.ones(2) * part.rank_tensor("gpus")
            assert inspect(x, gpus=1).tolist() == [1.0, 1.0]
            with pytest.raises(MixedTensorsError, match="different meshes"):
                x + whole
            with pytest.raises(IndexError):
                inspect(x, gpus=2)
        assert inspect(whole + 1, gpus=3).tolist() == [2.0, 2.0]


def test_nothing_is_left_on_ranks_after_deletes(four: Any) -> None:
    with four.activate():
        x = torch.zeros(4)
        mesh = x._spec.mesh
        inspect(x)
        before = max(mesh.workers.held.call().get().values())
        for _ in range(3000):
            x = x + 1
        kept = x
        del x
        gc.collect()

        def held() -> int:
            inspect(kept)
            return max(mesh.workers.held.call().get().values())

        wait_until(lambda: held() <= before + 1, "the end of values without handles")
        assert inspect(kept)[0] == 3000


def test_operations_without_company_are_sent(four: Any) -> None:
    seen = remote(lambda t: setattr(__import__("sys"), "seen_by_test", int(t)))
    with four.activate():
        seen(torch.tensor(5))
    mesh = engine(four).target
    wait_until(lambda: not engine(four).pending, "the idle sender")
    assert mesh.workers.done.call().get()


def test_ranks_share_the_cores_of_their_host(four: Any) -> None:
    with four.activate():
        threads = call_on_shard_and_fetch(remote(torch.get_num_threads)).result()
    assert threads == max(1, len(os.sched_getaffinity(0)) // 4)


def test_values_arrive_as_they_are(four: Any) -> None:
    made = [
        lambda: torch.zeros((), dtype=torch.bool),
        lambda: torch.empty(0, 3),
        lambda: torch.arange(6).reshape(2, 3).T,
        lambda: torch.ones(3, dtype=torch.complex64).conj() * (1 + 2j),
        lambda: torch.ones(2, dtype=torch.bfloat16)[None],
        lambda: torch.arange(10_000.0)[::2],
    ]
    with four.activate():
        there = [make() for make in made]
        found = fetch_shard(there).result()
    for make, arrived in zip(made, found):
        expected = make()
        assert type(arrived) is torch.Tensor and arrived.dtype == expected.dtype and torch.equal(arrived, expected)
        arrived.zero_()  # it is the program's own
