"""Pipes: generators in processes beside ranks, whose values are tensors of the mesh."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from monarch_kernel.actor import this_host
from monarch_kernel.tensor import (
    DeviceMeshError,
    RemoteException,
    create_pipe,
    inspect,
    remote,
    remote_generator,
)
from tests.conftest import _within as within
from tests.tensor import loaders


@pytest.fixture(scope="module")
def two(runtime: None) -> Any:
    """Two ranks."""
    return this_host().spawn_procs(per_host={"gpus": 2}, name="two")


@remote_generator("tests.tensor.loaders.counting", max_messages=2)
def counting(pipe: Any, count: int, size: int = 3) -> Generator[Any]:
    while True:
        yield {"x": torch.zeros(2, size), "at": torch.zeros(2, dtype=torch.int64), "k": -1}


def pids(mesh: Any, pipe: Any) -> list[int]:
    value = pipe.recv()
    return [pid for gpu in range(len(mesh)) for pid in inspect(value, gpus=gpu).tolist()]


@remote_generator("tests.tensor.loaders.telling_pids")
def telling_pids(pipe: Any) -> Generator[Any]:
    yield torch.zeros(2, dtype=torch.int64)
    yield torch.zeros(1)


def gone(processes: list[int]) -> bool:
    def ended(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return all(map(ended, processes))


def test_values_are_handles_in_order_with_the_stream(two: Any) -> None:
    with pytest.raises(ValueError, match="active"):
        counting(1)
    with two.activate():
        pipe = counting(4)
        assert repr(pipe).startswith("<Pipe tests.tensor.loaders.counting on two (gpus=2)")
        assert pipe.sizes == {"gpus": 2} and inspect(pipe.ranks["gpus"], gpus=1) == 1
        total, batch = torch.zeros(2, 3), {}
        for _ in range(4):
            batch = pipe.recv()
            assert batch["x"].shape == (2, 3) and batch["k"] == -1
            total += batch["x"] * (1 + two.rank_tensor("gpus"))
        over = pipe.recv()
    with two.slice(gpus=slice(1, 2)).activate():  # two pipes at the same time, one of them of a part of the mesh
        large = counting(2, size=100_000)
        wide = large.recv()["x"] + large.recv()["x"]
    assert inspect(batch["at"], gpus=1).tolist() == [1, 2]
    assert inspect(total).unique().item() == 6 and inspect(total, gpus=1).unique().item() == 12
    assert inspect(wide).shape == (2, 100_000) and inspect(wide).unique().item() == 1
    for _ in range(2):
        with pytest.raises(RemoteException, match="counting has ended: it gave 4 values") as ended:
            inspect(over["x"] + 1)
        assert "over = pipe.recv()" in ended.value.controller_frames
    pipe.close()
    pipe.close()
    with pytest.raises(RuntimeError, match="after close"):
        pipe.recv()


def test_yielded_values_and_an_exception(two: Any) -> None:
    def shapes(pipe: Any, base: Any) -> Generator[Any]:
        for _ in range(3):
            yield base.clone()

    with two.activate():
        base = torch.arange(2.0) * two.rank_tensor("gpus")
        with create_pipe(remote(loaders.yielding, propagate=shapes), base) as pipe:
            first, second, third = pipe  # ends with the shape function
            whole = first + second
            assert inspect(whole, gpus=1).tolist() == [3, 5]
            with pytest.raises(RemoteException, match="no more data on rank 1") as failed:
                inspect(third, gpus=1)
            with pytest.raises(StopIteration):
                pipe.recv()
    told = failed.value
    assert told.rank == 1 and "first, second, third = pipe" in told.controller_frames
    assert "loaders.py" in told.worker_error_string and "after 2 values" in told.worker_error_string


def test_the_program_sends(two: Any) -> None:
    seen: list[Any] = []

    def shapes(pipe: Any) -> Generator[Any]:
        while True:
            factor, value = pipe.recv()
            seen.append((factor, tuple(value.shape)))
            yield torch.empty_like(value)

    @remote(propagate=lambda t: t.clone())
    def broken(t: Any) -> Any:
        raise ValueError("not today")

    with two.activate():
        pipe = remote_generator(loaders.answering)(shapes)()
        pipe.send((2, torch.ones(3) * two.rank_tensor("gpus")))
        pipe.send((10, torch.arange(70_000.0)))
        a, b = pipe.recv(), pipe.recv()
        assert a.shape == (3,) and inspect(a, gpus=1).tolist() == [2, 2, 2]
        assert inspect(b)[-1] == 699_990
        pipe.send((1, broken(torch.ones(2))))
        with pytest.raises(RemoteException, match="could not be computed.*not today|not today"):
            inspect(pipe.recv())
        assert inspect(torch.ones(1)).item() == 1
    assert seen == [(2, (3,)), (10, (70_000,)), (1, (2,))]


def test_what_is_not_as_the_shapes_say_is_told(two: Any) -> None:
    @remote_generator(loaders.counting)
    def wrong(pipe: Any, count: int) -> Generator[Any]:
        yield {"x": torch.zeros(2, 4), "at": torch.zeros(2, dtype=torch.int64), "k": 0}
        yield [torch.zeros(2)]

    with two.activate():
        pipe = wrong(2)
        with pytest.raises(RemoteException, match=r"gave \[2, 3\] torch.float32, .* says \[2, 4\]"):
            inspect(pipe.recv()["x"])
        with pytest.raises(RemoteException, match="its shape function"):
            inspect(pipe.recv())
        missing = remote_generator("no_such_module.main")(lambda pipe: iter([torch.zeros(1)]))()
        with pytest.raises(RemoteException, match="No module named 'no_such_module'"):
            inspect(missing.recv())
        with pytest.raises(TypeError, match="remote function"):
            create_pipe(loaders.counting, 1)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="no shape function"):
            create_pipe(remote(loaders.counting), 1)


def test_a_killed_process_is_told_at_once_and_the_mesh_lives(two: Any) -> None:
    with two.activate():
        pipe = telling_pids()
        mine, child, *others = pids(two, pipe)
        waiting = pipe.recv()  # the generators never give this
        os.kill(mine, signal.SIGKILL)
        with pytest.raises(RemoteException, match=f"pid {mine}.* was killed by SIGKILL, after 1 values") as told:
            inspect(waiting)
        assert told.value.rank == 0
        os.kill(child, signal.SIGKILL)  # its parent could not
        assert inspect(torch.ones(1), gpus=0).item() == 1
        del pipe, waiting
        gc.collect()
        inspect(torch.ones(1), gpus=1)
    assert within(20, lambda: gone(others))  # what it had started, too


def test_processes_go_with_the_rank_and_the_mesh() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="short")
    with procs.activate():
        pipe = telling_pids()
        processes = pids(procs, pipe)
        os.kill(psutil.Process(processes[2]).ppid(), signal.SIGKILL)
        assert within(20, lambda: gone(processes[2:]))  # what the generator's process had started, too
        assert not gone(processes[:1])
        with pytest.raises(DeviceMeshError):
            inspect(pipe.recv())
    procs.stop().get()
    assert within(20, lambda: gone(processes))


def test_no_process_survives_its_controller(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        "from monarch_kernel.actor import this_host\n"
        "from tests.tensor.test_pipes import pids, telling_pids\n"
        "if __name__ == '__main__':\n"
        "    procs = this_host().spawn_procs(per_host={'gpus': 1})\n"
        "    with procs.activate():\n"
        "        pipe = telling_pids()\n"
        "        print(*pids(procs, pipe), flush=True)\n"
        "        time.sleep(600)\n"
    )
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    ) as controller:
        assert controller.stdout is not None
        assert select.select([controller.stdout], [], [], 120)[0]
        processes = [int(pid) for pid in controller.stdout.readline().split()]
        assert len(processes) == 2 and not gone(processes)
        controller.kill()
    assert within(20, lambda: gone(processes))
