"""Functions of a program's own, which ranks run like operations: what they give, and gradients through them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_kernel import function_resolvers, memory, profiler
from monarch_kernel.actor import Actor, current_rank, endpoint
from monarch_kernel.tensor import (
    MixedTensorsError,
    RemoteException,
    RemoteProcessGroup,
    call_on_shard_and_fetch,
    explain,
    fetch_shard,
    inspect,
    remote,
    remote_autograd_function,
)
from monarch_kernel.timer import (
    execution_timer_start,
    execution_timer_stop,
    get_execution_timer_average_ms,
    get_latest_timer_measurement,
)


def test_results_are_learnt_from_the_first_call(four: Any) -> None:
    runs = remote(_counted)
    with four.activate():
        x = torch.arange(6.0).view(2, 3) * four.rank_tensor("gpus")
        with explain() as plan:
            found = [runs(x, scale) for scale in (2.0, 2.0, 2.0, 3.0)]
            assert runs(x.double(), 2.0)["rows"][0].dtype == torch.float64
        assert plan.synchronisations == 3
        assert found[1]["rows"][0].shape == (3,)
        assert found[1]["name"] == "it"
        got = [f["rows"][0].tolist() for f in fetch_shard(found, gpus=2).get()]
        assert got == [[0, 4, 8]] * 3 + [[0, 6, 12]]
        assert call_on_shard_and_fetch(_calls, shard={"gpus": 3}).get() == 5  # each call ran once
        assert remote(lambda: 5)() == 5
        assert remote(lambda: None)() is None


def _counted(x: torch.Tensor, scale: float) -> Any:
    import builtins

    builtins.__dict__["_calls_in_test"] = _calls() + 1
    return {"rows": (x[1] * 0 + x[0] * scale, x.sum()), "name": "it"}


def _calls() -> int:
    import builtins

    return builtins.__dict__.get("_calls_in_test", 0)


def test_failures_and_differences_of_first_calls(four: Any) -> None:
    with four.activate():
        x = torch.ones(2)
        with pytest.raises(RemoteException, match="no such row") as caught:
            remote(_failing)(x)
        assert "remote(_failing)(x)" in caught.value.controller_frames
        with pytest.raises(ValueError, match="unlike that on rank 0"):
            remote(lambda rank: torch.ones(int(rank)))(four.rank_tensor("gpus"))
        assert inspect(x).tolist() == [1, 1]


def _failing(x: torch.Tensor) -> Any:
    raise KeyError("no such row")


def test_nested_results(four: Any) -> None:
    nested = remote(lambda t: {"a": t + 1, "b": (t.sum(), 7)}, propagate=lambda t: {"a": t, "b": (t.sum(), 4)})
    wrong = remote(lambda t: {"a": t[0]}, propagate=lambda t: {"a": t})
    with four.activate():
        got = nested(torch.ones(2))
        assert got["b"][1] == 4
        assert inspect((got["a"], got["b"][0]))[1] == 2
        with pytest.raises(RemoteException, match=r"gave .*\[\], where its propagate says .*\[2\]"):
            inspect(wrong(torch.ones(2)))


def test_verbs_of_functions(four: Any) -> None:
    scaled = remote(lambda t, k: (t * k, "it"))
    with four.activate():
        x = torch.ones(2) * four.rank_tensor("gpus")
        values = scaled.call(x, 2).get()
        assert values.item(gpus=3)[0].tolist() == [6, 6]
        assert [f.get()[0][0].item() for f in scaled.stream(x, 1)] == [0, 1, 2, 3]
        assert scaled.choose(x, 0).get()[1] == "it"
        assert inspect(scaled.rref(x, 3)[0], gpus=1).tolist() == [3, 3]
        remote(lambda t: t.fill_(8)).broadcast(x)
        assert inspect(x).tolist() == [8, 8]
        with pytest.raises(ValueError, match="exactly 1 actor, but mesh has 4"):
            scaled.call_one(x, 1)
    with four.slice(gpus=1).activate():
        assert scaled.call_one(torch.ones(1), 5).get()[0].item() == 5


class Asked(Actor):
    """Its endpoint is fetched from."""

    @endpoint
    def there(self, t: Any) -> Any:
        return current_rank().rank, t


def test_an_endpoint_is_called_on_one_rank(four: Any) -> None:
    asked = four.spawn("asked", Asked)
    with four.activate():
        x = torch.ones(2) * four.rank_tensor("gpus")
        _rank, value = call_on_shard_and_fetch(asked.there, x, shard={"gpus": 2}).get()
    assert value.tolist() == [2, 2]


class Scaled(torch.autograd.Function):
    """Something whose backward is not what autograd would give."""

    @staticmethod
    def forward(ctx: Any, x: Any, k: float, y: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.k = k
        return x * x * k, y.sum(), "both"

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        gradient, of_sum, _ = grad_outputs
        (x,) = ctx.saved_tensors
        return 100 * x * ctx.k * gradient, None, of_sum.expand(2)


def test_a_function_with_a_backward_of_its_own(four: Any) -> None:
    there = remote_autograd_function(Scaled)
    assert there.__name__ == "Remote_Scaled"
    with four.activate():
        x = torch.full((2,), 3.0, requires_grad=True)
        y = torch.ones(2) * four.rank_tensor("gpus")
        for _ in range(2):
            x.grad = None
            result, total, name = there.apply(x * 1, 2.0, y)
            assert name == "both"
            assert (result.requires_grad, total.requires_grad) == (True, True)
            (result.sum() + total).backward()
            assert [t.tolist() for t in inspect((result, total, x.grad), gpus=3)] == [[18, 18], 6, [600, 600]]
        with torch.no_grad():
            assert not there.apply(x, 2.0, y)[0].requires_grad
        again = there.apply(x, 2.0, y)[0].pow(2).sum()
        with pytest.raises(RuntimeError, match="once_differentiable"):
            torch.autograd.grad(again, x, create_graph=True)[0].sum().backward()
        with pytest.raises(TypeError, match="subclass of torch.autograd.Function"):
            remote_autograd_function(dict)  # type: ignore[arg-type]


def _summed(t: torch.Tensor, group: Any) -> Any:
    if float(t[0]) < 0:
        raise ValueError("a negative one")
    t = t.clone()
    torch.distributed.all_reduce(t, group=group)
    return t, torch.tensor(group.size())


def test_process_groups_of_the_program(four: Any) -> None:
    summed = remote(_summed, propagate=lambda t, group: (t, torch.tensor(group.size())))
    grid = four.split(gpus=("rows", "columns"), columns=2)
    with grid.activate():
        x = torch.ones(2) * grid.rank_tensor("rows") * 10 + grid.rank_tensor("columns")
        rows, all_ranks = grid.process_group("rows"), RemoteProcessGroup(("rows", "columns"), grid)
        assert (rows.size(), all_ranks.size()) == (2, 4)
        of_rows, of_all = summed(x, rows), summed(x, all_ranks)
        assert [t.tolist() for t in fetch_shard((*of_rows, of_all[0]), rows=0, columns=1).get()] == [
            [12, 12],
            2,
            [22, 22],
        ]
        got = call_on_shard_and_fetch(_summed, x, rows, shard={"rows": 1}).get()
        assert got[0].tolist() == [10, 10]
        negative = x - 5 * (grid.rank_tensor("rows") + grid.rank_tensor("columns") == 0).float()
        failed = summed(negative, all_ranks)[0]
        with pytest.raises(RemoteException, match="a negative one"):
            inspect(failed)  # and no rank waits
        assert inspect(summed(x, all_ranks)[0])[0] == 22
        with pytest.raises(MixedTensorsError, match="has not all ranks of its groups"):
            summed(x.slice_mesh(rows=0), rows)
        rows.drop()
        with pytest.raises(RuntimeError, match="after drop"):
            summed(x, rows)
    with pytest.raises(KeyError, match="dimension 'depth'"):
        RemoteProcessGroup("depth", grid)


def test_times_and_traces_of_the_ranks(four: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "traces")
    with four.activate():
        execution_timer_start("sum", use_cpu=True)
        torch.ones(100).sum()
        execution_timer_stop("sum", use_cpu=True)
        latest, mean = fetch_shard((get_latest_timer_measurement("sum"), get_execution_timer_average_ms("sum"))).get()
        assert latest.item() == mean.item() > 0
        with profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], on_trace_ready=folder) as running:
            with profiler.record_function("a section of mine"):
                torch.ones(100).sum()
            running.step()
        memory.record_memory_history(enabled=None)
        memory.dump_memory_snapshot(str(tmp_path))
        assert inspect(torch.ones(1)).item() == 1  # the ranks have done it all
        with pytest.raises(RemoteException, match="KeyError: 'never'"):
            inspect(torch.ones(1) * get_latest_timer_measurement("never"))
    traces = list((tmp_path / "traces").iterdir())
    assert len(traces) == 4
    assert all("a section of mine" in trace.read_text() for trace in traces)
    with pytest.raises(TypeError, match="must be a Schedule"):
        profiler.profile(schedule=(1, 1, 1))  # type: ignore[arg-type]


def test_functions_may_be_resolved_by_the_program(four: Any) -> None:
    def resolve(given: Any) -> str | None:
        return "math.hypot" if given == "my length" else None

    function_resolvers.append(resolve)
    try:
        length = remote("my length")
    finally:
        function_resolvers.remove(resolve)
    with four.activate():
        assert call_on_shard_and_fetch(length, 3, 4, shard={"gpus": 1}).get() == 5


def test_functions_that_are_called_for_what_they_do(four: Any) -> None:
    fill = remote(lambda x, value: x.fill_(value), propagate="inspect")
    with four.activate(), explain() as plan:
        x = torch.zeros(2)
        assert fill(x, 3.0) is None
        y = x + 1
    assert plan.synchronisations == 0
    assert inspect(y, gpus=3).tolist() == [4, 4]
    with pytest.raises(ValueError, match='"inspect", "mocked", or "cached"'):
        remote(len, propagate="unknown")


def test_builtins_are_found_by_name(four: Any) -> None:
    with four.activate():
        x = torch.arange(3.0) - 1
        assert call_on_shard_and_fetch(remote("len"), x).get() == 3
        assert inspect(remote("abs", propagate=lambda x: x)(x), gpus=1).tolist() == [1, 0, 1]
        with pytest.raises(ValueError, match="name it as module.function"):
            remote("no_builtin")


def test_a_device_that_a_function_sets_is_refused(four: Any) -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.set_device(7)
        return x

    with four.activate():
        with pytest.raises(RemoteException, match=r"set_device\(7\).*this rank computes on (cpu|cuda:\d).*Leave the"):
            inspect(remote(choose, propagate=lambda x: x)(torch.ones(1)))
        with pytest.raises(MixedTensorsError, match="(?s)choose: a local tensor.*with mesh.activate"):
            remote(choose, propagate=lambda x: x)(LOCAL)


LOCAL = torch.ones(2)
