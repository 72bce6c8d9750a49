"""Ranks that die or fail alone while a program trains: what is told, what is left, and how it goes on."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

import monarch_kernel
from monarch_kernel.actor import this_host
from monarch_kernel.distributed import Mesh, distribute, module_to_mesh
from monarch_kernel.runtime.tensor.controller import engine as engine_module
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.tensor import DeviceMeshError, RemoteException, call_on_shard_and_fetch, inspect, remote
from tests import deaths
from tests.conftest import alive, wait_until
from tests.deaths import PROCESS_KINDS


@pytest.fixture
def mesh(runtime: None) -> Iterator[Mesh]:
    with Mesh((4,), ("data",)) as made:
        yield made


def pids(mesh: Mesh) -> list[int]:
    return mesh._target.engine.ask(mesh._target, os.getpid)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))


def losses(mesh: Mesh, kills: dict[int, int], steps: int = 5) -> list[float]:
    """The article's loop; `kills`: in which step which rank is killed, between forward and backward."""
    model = module_to_mesh(network(), mesh, "shard")
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    schedule = optim.lr_scheduler.StepLR(optimizer, 2)
    mesh.track(schedule)
    loss_fn = nn.MSELoss()
    torch.manual_seed(7)
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(steps)]
    kills = dict(kills)
    found: list[float] = []

    def step(batch: Any) -> Any:
        x, y = batch
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        rank = kills.pop(len(found), None)
        if rank is not None:
            os.kill(pids(mesh)[rank], signal.SIGKILL)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    while len(found) < steps:
        try:
            loss = mesh.execute(step, data[len(found)])
        except DeviceMeshError:
            mesh = monarch_kernel.heal_mesh(mesh)
            assert mesh.healed.procs.replaced and mesh.healed.snapshot and not mesh.healed.steps_back
            continue
        found.append(loss.item())
    return found


def test_killed_ranks_do_not_change_the_losses(runtime: None) -> None:
    with Mesh((4,), ("data",)) as undisturbed:
        expected = losses(undisturbed, {})
    with Mesh((4,), ("data",)) as mesh:
        assert losses(mesh, {1: 2, 3: 0}) == expected


def test_without_the_rank_that_has_the_copy_a_checkpoint_is_needed(mesh: Mesh) -> None:
    model = module_to_mesh(network(), mesh, "shard")
    mesh.snapshot(wait=True)
    killed = pids(mesh)[1:3]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, killed)), "two deaths")
    with pytest.raises(DeviceMeshError, match=r"is healed, but .* rank 1 has died, and so has rank 2"):
        monarch_kernel.heal_mesh(mesh)
    with pytest.raises(DeviceMeshError, match="died"):
        model[0].weight.full_tensor()  # type: ignore[operator]  # of a handle
    assert distribute(torch.ones(8), mesh, ["data"]).sum().item() == 8.0


@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_every_kind_of_death_is_told_and_healed(runtime: None, kind: str) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name=f"dies-{kind}")

    @remote
    def die() -> None:
        if here().rank == 1:
            deaths.die(kind)

    with procs.activate():
        x = torch.ones(2)
        die.broadcast()
        with pytest.raises(DeviceMeshError, match=r"heal_mesh\(mesh\) replaces dead ranks"):
            while True:
                x = x + 1
        with pytest.raises(DeviceMeshError):
            inspect(x)
        assert monarch_kernel.heal_mesh(procs).healed
        y = torch.ones(3) * procs.rank_tensor("gpus")  # definitions that the new process did not know
        assert inspect(y + 1, gpus=1).tolist() == [2.0, 2.0, 2.0]
        with pytest.raises(DeviceMeshError, match="has died"):
            inspect(x, gpus=1)
    procs.stop().get()


def test_a_rank_that_fails_alone_holds_nobody_up(mesh: Mesh) -> None:
    @remote(propagate=lambda t: t)
    def picky(t: Any) -> Any:
        if here().rank == 2:
            raise ValueError("two cannot")
        return t

    x = distribute(torch.arange(8.0), mesh, ["data"])
    for _ in range(2):  # also in the group that was formed anew
        failed = picky(x)
        total = failed.sum() + x.sum()
        with pytest.raises(RemoteException, match="two cannot") as told:
            total.item()
        assert told.value.rank == 2 and "failed = picky(x)" in told.value.controller_frames
        assert x.sum().item() == 28.0
        with pytest.raises(RemoteException, match="two cannot"):  # on every rank, so that none waits for another
            failed.full_tensor()

    with pytest.raises(RemoteException, match="two cannot"):
        call_on_shard_and_fetch(lambda t: picky.function(t) is None, x).get()
    assert (x + 1).full_tensor().tolist() == [float(n) for n in range(1, 9)]


def test_what_fails_on_all_ranks_keeps_the_group(mesh: Mesh) -> None:
    @remote(propagate=lambda t: t)
    def broken(t: Any) -> Any:
        raise ValueError("none can")

    x = distribute(torch.arange(8.0), mesh, ["data"])

    def group() -> int:
        return id(torch.distributed.group.WORLD)

    before = mesh._target.engine.ask(mesh._target, group)
    with pytest.raises(RemoteException, match="none can"):
        broken(x).sum().item()
    assert x.sum().item() == 28.0
    assert mesh._target.engine.ask(mesh._target, group) == before


def test_a_python_failure_of_any_kind_ends_nothing(mesh: Mesh) -> None:
    def fails(error: BaseException) -> Callable[..., Any]:
        def function(t: Any) -> Any:
            raise error

        return function

    x = distribute(torch.ones(4), mesh, ["data"])
    for error in (SystemExit(3), KeyboardInterrupt(), MemoryError("too much")):
        with pytest.raises(RemoteException, match=type(error).__name__):
            remote(fails(error), propagate=lambda t: t)(x).sum().item()
        with pytest.raises(RemoteException, match=type(error).__name__):
            call_on_shard_and_fetch(fails(error), x).get()
    assert x.sum().item() == 4.0


def test_going_back_after_a_failed_step(mesh: Mesh) -> None:
    model = module_to_mesh(nn.Linear(3, 2), mesh)
    weight: Any = model.weight
    mesh.snapshot()
    before = weight.full_tensor().detach().clone()

    def ruin(t: Any) -> None:
        if here().rank == 1:
            raise ValueError("halfway")
        t.mul_(0)

    with torch.no_grad():
        weight.mul_(2)
        remote(ruin, propagate=lambda t: (t.mul_(0), None)[1])(weight)
    with pytest.raises(RemoteException, match="halfway"):
        weight.full_tensor()
    mesh.restore_snapshot()
    assert torch.equal(weight.full_tensor().detach(), before)


def test_the_controller_runs_ahead_within_a_window(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WINDOW", 200)
    engine = mesh._target.engine
    x = distribute(torch.ones(4), mesh, ["data"])
    furthest = 0
    for _ in range(1500):
        x = x + 1
        furthest = max(furthest, len(engine.places))
    assert furthest <= 4 * 200  # frames of operations that ranks have done are not kept
    assert x.sum().item() == 4 * 1501.0
    held = max(mesh._target.workers.held.call().get().values())
    assert held < 700


def test_snapshots_are_dropped_with_what_they_are_of(mesh: Mesh) -> None:
    model = module_to_mesh(network(), mesh)
    mesh.snapshot(wait=True)
    mesh.snapshot(wait=True)

    def copies() -> int:
        kept = here().store.extras.get("snapshots")
        return 0 if kept is None else sum(len(c.parts) for c in kept.own.values()) + sum(map(len, kept.others.values()))

    assert min(mesh._target.engine.ask(mesh._target, copies)) == 2 * 4 + 2
    mesh.drop_snapshots()
    assert max(mesh._target.engine.ask(mesh._target, copies)) == 0
    held = max(mesh._target.workers.held.call().get().values())
    del model
    gc.collect()

    def left() -> int:
        inspect(distribute(torch.ones(1), mesh))
        return max(mesh._target.workers.held.call().get().values())

    wait_until(lambda: left() <= held - 2, "the end of the parameters on the ranks")
