"""Collectives are seen whoever calls them, with their values, and can be answered without other processes."""

from __future__ import annotations

import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from monarch_kernel.numerics import collectives  # noqa: E402
from monarch_kernel.numerics.collectives import Collective, CollectivesError, answer, observe  # noqa: E402
from tests.numerics.ranks import run_ranks  # noqa: E402
from tests.waiting import patience  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.torch.distributed:FutureWarning"),  # names that later versions replace
]
Seen = tuple[str, tuple[int, ...], str, int | None, list[list[float]], list[list[float]]]


def seen(collective: Collective) -> Seen:
    """What a test compares of a collective."""
    values = [[each.flatten().tolist() for each in part] for part in (collective.inputs, collective.outputs)]
    return collective.kind, collective.group, collective.op, collective.peer, values[0], values[1]


def called_by_python(rank: int) -> list[Seen]:
    found: list[Seen] = []
    pair = dist.new_group([0, 1])
    with observe(lambda each: found.append(seen(each))):
        one = torch.tensor([float(rank + 1)])
        dist.all_reduce(one)
        work = dist.all_reduce(one, op=dist.ReduceOp.MAX, group=pair, async_op=True)
        assert work is not None
        work.wait()
        parts = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(parts, torch.tensor([float(rank)]))
        half = torch.zeros(1)
        dist.reduce_scatter_tensor(half, torch.tensor([1.0, 2.0]))
        dist.broadcast(one, src=1)
        if rank == 0:
            dist.send(torch.tensor([7.0]), 1)
        else:
            dist.recv(torch.zeros(1), 0)
        dist.barrier()
    dist.all_reduce(one)
    assert not collectives.is_installed()
    return found


def test_calls_by_python(tmp_path: Path) -> None:
    first, second = run_ranks(called_by_python, 2, tmp_path)
    both = (0, 1)
    assert first == [
        ("all_reduce", both, "sum", None, [[1.0]], [[3.0]]),
        ("all_reduce", both, "max", None, [[3.0]], [[3.0]]),
        ("all_gather", both, "", None, [[0.0]], [[0.0], [1.0]]),
        ("reduce_scatter", both, "sum", None, [[1.0, 2.0]], [[2.0]]),
        ("broadcast", both, "", 1, [[3.0]], [[3.0]]),
        ("send", both, "", 1, [[7.0]], []),
        ("barrier", both, "", None, [], []),
    ]
    assert second[0] == ("all_reduce", both, "sum", None, [[2.0]], [[3.0]])
    assert second[5] == ("recv", both, "", 0, [], [[7.0]])


def called_by_cpp(rank: int) -> tuple[list[str], list[float], list[float], list[str]]:
    torch.manual_seed(0)
    reduced: list[Collective] = []
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    with observe(reduced.append):
        model(torch.full((1, 2), float(rank + 1))).sum().backward()
    kinds = [each.kind for each in reduced]
    (weight,) = model.parameters()
    assert weight.grad is not None
    sent, received = reduced[-1].inputs[0], reduced[-1].outputs[0]
    return kinds, sent.tolist(), received.tolist(), [each.line.partition(":")[0] for each in reduced]


def test_calls_of_the_reducer_of_ddp(tmp_path: Path) -> None:
    first, second = run_ranks(called_by_cpp, 2, tmp_path)
    # DDP divides by the number of ranks before it sums.
    assert first == (["all_reduce"], [0.5, 0.5], [1.5, 1.5], ["test_collectives.py"])
    assert second == (["all_reduce"], [1.0, 1.0], [1.5, 1.5], ["test_collectives.py"])


def called_by_others(rank: int) -> list[tuple[str, int]]:
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    model = fully_shard(torch.nn.Linear(4, 4, bias=False), mesh=mesh)
    assert isinstance(model, torch.nn.Linear)
    found: list[tuple[str, int]] = []
    with observe(lambda each: found.append((each.kind, each.sequence))):
        assert functional.all_reduce(torch.ones(2), "sum", mesh).tolist() == [2.0, 2.0]
        assert sharded.full_tensor().tolist() == [1.0] * 4
        model(torch.ones(1, 4)).sum().backward()
        with torch.inference_mode():
            dist.all_reduce(torch.ones(1))
    return found


def test_calls_by_functional_collectives_dtensor_and_fsdp(tmp_path: Path) -> None:
    (first, second) = run_ranks(called_by_others, 2, tmp_path)
    assert [kind for kind, _ in first] == [
        "all_reduce",  # functional
        "all_gather",  # DTensor
        "all_gather",  # FSDP2: forward
        "reduce_scatter",  # backward
        "all_reduce",  # under inference_mode
    ]
    assert first == second
    assert first[0][1] == 0, "sequences begin at 0 for each group"


def failing_callback(rank: int) -> tuple[list[float], list[str], bool]:
    def fail(_: Collective) -> None:
        raise ValueError("no space")

    tensor = torch.ones(1)
    with warnings.catch_warnings(record=True) as caught, observe(None, started=fail):
        warnings.simplefilter("always")
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    return tensor.tolist(), [str(each.message) for each in caught], collectives.is_installed()


def test_a_callback_that_fails_ends_the_observation_alone(tmp_path: Path) -> None:
    for tensor, messages, installed in run_ranks(failing_callback, 2, tmp_path):
        assert tensor == [4.0]
        assert messages == ["collectives are no longer observed; the program continues: ValueError: no space"]
        assert not installed


def failing_calls() -> list[str]:
    found: list[str] = []
    for call in (
        lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR),
        lambda: dist.all_gather([torch.ones(2)], torch.ones(2)),
        lambda: dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(2)),
    ):
        try:
            call()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def failing_twice(rank: int) -> tuple[list[str], list[str]]:
    unobserved = failing_calls()
    with observe(lambda _: None):
        return unobserved, failing_calls()


def test_errors_of_collectives_are_the_programs(tmp_path: Path) -> None:
    for unobserved, observed in run_ranks(failing_twice, 2, tmp_path):
        assert len(unobserved) == 3 and observed == unobserved


def blocking(rank: int) -> bool:
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=patience(20)))
    begun = threading.Event()

    def work() -> None:
        begun.wait()
        for _ in range(1000):  # each of them lets the other thread have the GIL
            store.add("number", 1)
        store.set("worked", "")

    if rank == 1:
        store.wait(["worked"])
        dist.monitored_barrier()
        return True
    worker = threading.Thread(target=work)
    worker.start()
    with observe(None, lambda _: begun.set()):
        dist.monitored_barrier()  # ends once the other thread has worked
    worker.join()
    return True


def test_other_threads_run_while_a_collective_blocks(tmp_path: Path) -> None:
    assert run_ranks(blocking, 2, tmp_path) == [True, True]


def answered(rank: int) -> tuple[list[float], list[float], list[Any]]:
    asked: list[str] = []

    def fill(collective: Collective) -> None:
        asked.append(str(collective).partition(" at ")[0])
        for output in collective.outputs:
            output.fill_(42.0)

    tensor, whole = torch.ones(2), torch.zeros(2, 2)
    if rank == 0:  # rank 1 does not take part
        with answer(fill):
            with pytest.raises(CollectivesError, match="runs in this process already"):
                answer(fill)
            dist.all_reduce(tensor)
            dist.all_gather_into_tensor(whole, torch.ones(1, 2))
            model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), init_sync=False)
            model(torch.ones(1, 1)).sum().backward()
            (weight,) = model.parameters()
            assert weight.grad is not None and weight.grad.item() == 42.0
            dist.barrier()
    return tensor.tolist(), whole.flatten().tolist(), asked


def test_answers_replace_collectives(tmp_path: Path) -> None:
    (first, _) = run_ranks(answered, 2, tmp_path)
    assert first == (
        [42.0, 42.0],
        [42.0] * 4,
        [
            "all_reduce (sum) of float32[2]",
            "all_gather of float32[1, 2]",
            "all_reduce (sum) of float32[1]",
            "barrier of nothing",
        ],
    )
