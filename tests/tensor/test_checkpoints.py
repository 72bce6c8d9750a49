"""Checkpoints of sharded modules and optimizers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import monarch_kernel
from monarch_kernel.distributed import Mesh, load_checkpoint, module_to_mesh, save_checkpoint
from monarch_kernel.private_files import NotPrivateError
from monarch_kernel.tensor import DeviceMeshError
from tests.conftest import alive, wait_until


@pytest.fixture
def mesh(runtime: None) -> Iterator[Mesh]:
    with Mesh((2, 2), ("data", "model")) as made:
        yield made


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses: list[Any] = []
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def on(mesh: Mesh, plan: Any) -> tuple[nn.Module, optim.Optimizer]:
    model = module_to_mesh(network(), mesh, plan)
    return model, optim.AdamW(model.parameters(), lr=0.01)


def test_training_goes_on_in_another_layout_and_after_a_loss(mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    mesh.snapshot_every = 0
    model, optimizer = on(mesh, "shard")
    train(model, optimizer, 2)
    save_checkpoint(path, mesh, model, optimizer)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_checkpoint(path, mesh, model, optimizer)
    save_checkpoint(path, mesh, model, optimizer, overwrite=True)
    assert os.listdir(tmp_path) == ["checkpoint"] and path.stat().st_mode & 0o077 == 0
    expected = train(model, optimizer, 3)

    other, fresh = on(mesh, {"0.weight": ["model", "data"]})
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    load_checkpoint(path, mesh, other, fresh)
    assert train(other, fresh, 3) == pytest.approx(expected, abs=1e-6)

    killed = mesh._target.engine.ask(mesh._target, os.getpid)[3]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not alive(killed), "a death")
    with pytest.raises(DeviceMeshError, match="are not whole: there was no snapshot"):
        mesh = monarch_kernel.heal_mesh(mesh)
    load_checkpoint(path, mesh, model, optimizer)
    assert train(model, optimizer, 3) == pytest.approx(expected, abs=1e-6)


def test_a_folder_that_is_more_than_a_checkpoint_is_not_replaced(mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "work"
    (path / "notes").mkdir(parents=True)
    (path / "thesis.tex").write_text("years")
    model, _ = on(mesh, None)
    with pytest.raises(FileExistsError, match="is no part of a checkpoint"):
        save_checkpoint(path, mesh, model, overwrite=True)
    assert sorted(os.listdir(path)) == ["notes", "thesis.tex"] and os.listdir(tmp_path) == ["work"]


def test_a_checkpoint_that_others_can_write_is_not_read(mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    model, optimizer = on(mesh, None)
    save_checkpoint(path, mesh, model)
    os.chmod(path / ".metadata", 0o666)
    with pytest.raises(NotPrivateError, match="could be changed by others"):
        load_checkpoint(path, mesh, model)
    os.chmod(path / ".metadata", 0o600)
    with pytest.raises(KeyError, match="another model or optimizer"):
        load_checkpoint(path, mesh, module_to_mesh(nn.Linear(3, 3), mesh))
    tmp_path.chmod(0o777)
    with pytest.raises(NotPrivateError, match="other users may write to"):
        save_checkpoint(path, mesh, model, optimizer, overwrite=True)
    assert os.listdir(tmp_path) == ["checkpoint"]
    tmp_path.chmod(0o700)
    load_checkpoint(path, mesh, model)
