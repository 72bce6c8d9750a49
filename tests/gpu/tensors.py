"""Tensors on meshes, on GPUs: operations, ranks that meet, streams, seeds, sharded tensors, checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from monarch_kernel.actor import this_host
from tests.gpu import check, close, device, equal


def operations() -> str:
    """A program over a mesh of two ranks, whose values are those of one process on a CPU. Returns the device."""
    import torch

    from monarch_kernel.tensor import Stream, fetch_shard, inspect, remote

    procs = this_host().spawn_procs(per_host={"gpus": 2}, preload=("torch",))
    torch.manual_seed(0)
    given = torch.randn(8, 16)
    where = remote(_device_number, propagate=lambda x: torch.zeros((), dtype=torch.int64))
    with procs.activate():
        x = torch.tensor(given.tolist())
        at = procs.rank_tensor("gpus")
        y = (x @ x.T).relu() + at
        total = y.reduce("gpus", reduction="sum")
        stacked = y.sum(1).reduce("gpus", reduction="stack")
        scattered = y.sum(1).view(2, 4).reduce("gpus", reduction="sum", scatter=True)
        other = Stream("other")
        borrowed, loan = other.borrow(y)
        with other.activate():
            doubled = borrowed * 2
        loan.drop()
        second = procs.slice(gpus=1)
        moved = y.slice_mesh(gpus=0).to_mesh(second)
        with second.activate():
            moved = moved + 1
        weight = torch.full((16,), 0.5, requires_grad=True)
        (x * weight).pow(2).sum().backward()
        number = where(x)
    wanted = (given @ given.T).relu()
    close(fetch_shard(y, gpus=1).get(), wanted + 1, 1e-4)
    close(inspect(total), 2 * wanted + 1, 1e-4)
    close(inspect(stacked, gpus=1), torch.stack([wanted.sum(1), (wanted + 1).sum(1)]), 1e-4)
    close(inspect(scattered, gpus=1), (2 * wanted + 1).sum(1)[4:], 1e-4)
    close(inspect(doubled, gpus=1), 2 * (wanted + 1), 1e-4)
    close(inspect(moved), wanted + 1, 1e-4)
    close(inspect(weight.grad), given.pow(2).sum(0), 1e-4)
    return "cpu" if inspect(number).item() < 0 else "cuda"


def _device_number(x: Any) -> Any:
    import torch

    return torch.tensor(-1 if x.device.type == "cpu" else x.device.index)


@check(deadline=60, cpu=True)
def activate() -> None:
    """`mesh.activate()`: operations, reductions, streams and gradients of two ranks on one card."""
    equal(operations(), device())


@check(deadline=60)
def activate_from_a_controller_without_a_gpu() -> None:
    """The same from a controller that sees no card, whose ranks do."""
    program = "from tests.gpu.tensors import blind; blind()"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=55)
    assert ran.returncode == 0, ran.stderr[-3000:]


def blind() -> None:
    """The controller without a card. Its ranks get the card back, which its environment takes from all it starts."""
    import torch

    from monarch_kernel.tensor import inspect

    assert not torch.cuda.is_available()
    procs = this_host().spawn_procs(per_host={"gpus": 2}, env={"CUDA_VISIBLE_DEVICES": "0"})
    with procs.activate():
        x = torch.arange(6.0).view(2, 3) + procs.rank_tensor("gpus")
        y = (x @ x.T).reduce("gpus", reduction="sum")
    zero = torch.arange(6.0).view(2, 3)
    close(inspect(y), zero @ zero.T + (zero + 1) @ (zero + 1).T)
    equal(inspect(y).device.type, "cpu")
    actors = procs.spawn("actors", _runner())
    equal(actors.slice(gpus=1).run.call_one(_on_card).get(), "cuda:0")
    equal(actors.slice(gpus=1).run.call_one(_a_tensor).get().tolist(), [1.0, 1.0])


def _runner() -> Any:
    from tests.gpu import Runner

    return Runner


def _on_card() -> str:
    return str(_a_tensor().device)


def _a_tensor() -> Any:
    import torch

    return torch.ones(2, device="cuda")


@check(deadline=60, cpu=True)
def seeds() -> None:
    """Random numbers of ranks after a seed are those of one process on that kind of device."""
    import torch

    from monarch_kernel.random import manual_seed
    from monarch_kernel.tensor import inspect

    procs = this_host().spawn_procs(per_host={"gpus": 2}, preload=("torch",))
    torch.manual_seed(7)
    wanted = torch.rand(5, device=device())
    # The controller makes these operations of `dropout`, for any device. A GPU alone has one kernel for it, which draws
    # other numbers (docs/gpu.md).
    dropped = torch.ones(1000, device=device()) * torch.empty(1000, device=device()).bernoulli_(0.7).div_(0.7)
    with procs.activate():
        torch.manual_seed(7)
        first = torch.rand(5, device=device())
        masked = torch.nn.functional.dropout(torch.ones(1000, device=device()), 0.3)
        manual_seed(7, per_rank=True)
        own = torch.rand(5, device=device())
    for rank in (0, 1):
        close(inspect(first, gpus=rank), wanted, 0)
        close(inspect(masked, gpus=rank), dropped, 0)
    close(inspect(own, gpus=0), wanted, 0)
    assert not torch.equal(inspect(own, gpus=1).cpu(), wanted.cpu())


def _network() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7), nn.GELU(), nn.Linear(7, 3))


def _train(model: Any, place: Any = None) -> list[float]:
    import torch
    from torch import nn, optim

    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    losses: list[Any] = []
    for _ in range(4):
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y if place is None else place(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


@check(deadline=60, cpu=True)
def sharded() -> None:
    """`distribute` and `module_to_mesh` on two ranks of one card, and a checkpoint that another mesh loads."""
    import torch
    from torch import optim

    from monarch_kernel.distributed import Mesh, distribute, load_checkpoint, module_to_mesh, save_checkpoint
    from monarch_kernel.runtime.tensor.sharded.controller.mesh import PRELOAD

    procs = this_host().spawn_procs(per_host={"gpus": 2}, preload=PRELOAD)
    mesh = Mesh.of(procs, ("data",), (2,))
    whole = torch.randn(7, 8, generator=torch.Generator().manual_seed(3))
    part = distribute(whole, mesh, sharding_spec=["data", None])
    close((part @ part.T).softmax(1).full_tensor(), (whole @ whole.T).softmax(1), 1e-4)
    close(part.redistribute([None, "data"]).sum(0).full_tensor(), whole.sum(0), 1e-4)
    part[2] = 5.0
    close(part.full_tensor()[2], torch.full((8,), 5.0), 0)
    wanted = _train(_network())
    for plan in (None, "shard"):
        got = _train(module_to_mesh(_network(), mesh, plan), lambda y: mesh.distribute(y, ["data"]))
        assert max(abs(a - b) for a, b in zip(got, wanted, strict=True)) < 1e-4, (got, wanted)
    model = module_to_mesh(_network(), mesh, "shard")
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        path = Path(folder) / "checkpoint"
        save_checkpoint(path, mesh, model, optimizer)
        blind = this_host().spawn_procs(per_host={"gpus": 1}, env={"CUDA_VISIBLE_DEVICES": ""})
        on_cpu = Mesh.of(blind, ("data",), (1,))
        loaded = module_to_mesh(_network(), on_cpu, None)
        other = optim.AdamW(loaded.parameters(), lr=0.01)
        load_checkpoint(path, on_cpu, loaded, other)
        for ours, theirs in zip(loaded.parameters(), model.parameters(), strict=True):
            close(ours.full_tensor(), theirs.full_tensor(), 0)


def _with_fsdp(device_mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = _network().to(device())
    fully_shard(model[0], mesh=device_mesh)
    return fully_shard(model, mesh=device_mesh)


@check(deadline=60, cpu=True)
def fsdp() -> None:
    """torch's `fully_shard` built on two ranks of one card; the losses are those of one process."""
    from monarch_kernel.distributed import Mesh, RemoteModule
    from monarch_kernel.runtime.tensor.sharded.controller.mesh import PRELOAD

    procs = this_host().spawn_procs(per_host={"gpus": 2}, preload=PRELOAD)
    model = RemoteModule(Mesh.of(procs), _with_fsdp, lambda x: x.new_empty(x.shape[0], 3))
    got, wanted = _train(model), _train(_network())
    assert max(abs(a - b) for a, b in zip(got, wanted, strict=True)) < 1e-4, (got, wanted)


@check(cpu=True)
def first_nan() -> None:
    """`watch_nan` stops at the line that made the first NaN on a rank; the debugger compares tensors of the card."""
    import torch

    from monarch_kernel.debug import diff
    from monarch_kernel.tensor import NonFiniteError, watch_nan

    procs = this_host().spawn_procs(per_host={"gpus": 2}, preload=("torch",))
    with procs.activate():
        x = torch.ones(3) * (1 - procs.rank_tensor("gpus") * 2)
        try:
            with watch_nan():
                y = x * 2
                y = y.log()
                y + 1
        except NonFiniteError as e:
            equal(e.rank, 1)
            assert "y = y.log()" in e.controller_frames, e.controller_frames
        else:
            raise AssertionError("no NaN was seen")
    text = str(diff(x))
    assert "float32 [3]" in text and "[1]" in text, text
