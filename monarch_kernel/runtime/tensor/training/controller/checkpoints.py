"""Save and load modules and optimizers of a sharded mesh in a folder: ``save_checkpoint`` and ``load_checkpoint``."""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.world_group import everywhere
from monarch_kernel.runtime.tensor.sharded.controller.mesh import mesh_from
from monarch_kernel.runtime.tensor.training.controller.training_state import TrainingState
from monarch_kernel.runtime.tensor.training.rank import checkpoints as on_ranks


def save_checkpoint(
    path: str | os.PathLike[str],
    mesh: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a module and its optimizer to a folder, in order with the operations. Returns when it is complete.

    Each rank writes its parts (``torch.distributed.checkpoint``), so the folder must be on a file system that all hosts
    share. torch can read it without this package. Only this user can read it. It is written beside `path` and renamed
    when it is complete: a crash leaves the old or the new checkpoint.

    Args:
        path: the path of the folder, on the ranks and here.
        overwrite: replace an existing checkpoint.

    Raises:
        FileExistsError: the folder exists and `overwrite` is false, or it has other files besides a checkpoint.
        NotPrivateError: another user could change the folder.
        ValueError: the mesh does not have all processes that were spawned together.
        DeviceMeshError: a rank has died. The folder is unchanged.
    """
    mesh, path = mesh_from(mesh), os.path.abspath(os.fspath(path))
    engine = _whole_world(mesh)
    if os.path.lexists(path):
        if not overwrite:
            raise FileExistsError(f"checkpoint {path} is there already: pass overwrite=True to replace it")
        on_ranks.check_replaceable(path)
    folder = f"{path}.{secrets.token_hex(4)}.new"
    names, local = _named(model, optimizer)
    with engine.lock, _disable_current_modes():
        try:
            everywhere(engine, on_ranks.save, names, folder, 0)
            local_file = os.path.join(folder, on_ranks.LOCAL)
            with open(os.open(local_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                torch.save(local, file)
            on_ranks.publish(folder, path, overwrite)
        except BaseException:
            on_ranks.discard(folder)
            raise


def load_checkpoint(
    path: str | os.PathLike[str],
    mesh: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Read a module and its optimizer in place, from a folder written by `save_checkpoint`.

    The shape of the mesh and the layouts of the parameters may differ from those at the time of saving. Values that
    were lost with their ranks are restored.

    Raises:
        FileNotFoundError: there is no such folder.
        NotPrivateError: another user could have changed the folder; checkpoints are partly pickled.
        KeyError, RuntimeError: the module or the optimizer does not match.
        DeviceMeshError: a rank has died.
    """
    mesh, path = mesh_from(mesh), os.path.abspath(os.fspath(path))
    engine = _whole_world(mesh)
    on_ranks.check(path)
    local = torch.load(os.path.join(path, on_ranks.LOCAL), weights_only=True)
    if optimizer is not None:
        _make_state(optimizer, local)
    names, now = _named(model, optimizer)
    missing = (
        sorted(set(local["names"]) ^ set(now["names"]))
        if optimizer is not None
        else sorted(set(now["names"]) - set(local["names"]))
    )
    if missing:
        raise KeyError(f"checkpoint {path} is of another model or optimizer: they differ in {', '.join(missing[:5])}")
    with engine.lock, _disable_current_modes():
        everywhere(engine, on_ranks.load, names, path, mesh._target.key)
    if optimizer is not None:
        for group, saved in zip(optimizer.param_groups, local["groups"]):
            group.update(saved)
        for parameter, saved in zip(_parameters(optimizer), local["state"]):
            for name, value in saved.items():
                optimizer.state[parameter][name] = value
    TrainingState.of(mesh).add_module(model)


def _whole_world(mesh: Any) -> Any:
    engine = mesh._target.engine
    if len(mesh._target.ranks) != len(engine.world):
        raise ValueError(
            f"mesh {mesh.name} has {len(mesh._target.ranks)} of the {len(engine.world)} processes that were spawned "
            "together: a checkpoint is written by all of them"
        )
    return engine


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _named(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[on_ranks.Names, dict[str, Any]]:
    """Return the values that the ranks write, and the state that this process writes."""
    layouts = TrainingState.layouts
    names: on_ranks.Names = {}

    def add(name: str, handle: Any, layout: Any) -> None:
        spec = handle._spec
        known = None if layout is None else (layout, tuple(spec.size), spec.stride, spec.dtype)
        names[name] = handle._owner.id, known

    for name, handle in [*model.named_parameters(), *model.named_buffers()]:
        if type(handle) is Tensor:
            add(f"model.{name}", handle, layouts.get(handle))
    local: dict[str, Any] = {"groups": [], "state": []}
    if optimizer is not None:
        local["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for i, parameter in enumerate(_parameters(optimizer)):
            state = optimizer.state.get(parameter, {})
            local["state"].append({k: v for k, v in state.items() if type(v) is not Tensor})
            for key, handle in state.items():
                if type(handle) is Tensor:
                    alike = handle.shape == parameter.shape
                    add(f"optimizer.{i}.{key}", handle, layouts.get(parameter) if alike else None)
    local["names"] = sorted(names)
    return names, local


def _make_state(optimizer: torch.optim.Optimizer, local: dict[str, Any]) -> None:
    """Create the state tensors of the checkpoint for an optimizer without steps."""
    for i, parameter in enumerate(_parameters(optimizer)):
        prefix = f"optimizer.{i}."
        state = optimizer.state[parameter]
        for name in local["names"]:
            if name.startswith(prefix) and name.removeprefix(prefix) not in state:
                with torch.no_grad():
                    state[name.removeprefix(prefix)] = torch.zeros_like(parameter)
