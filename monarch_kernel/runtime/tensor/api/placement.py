"""Move and reduce all tensors in nested containers, get coordinates, and show values."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from monarch_kernel.runtime.actor.hosts.host_mesh import this_host
from monarch_kernel.runtime.mesh.shape import unknown_dimension
from monarch_kernel.runtime.tensor.api.activation import tensor_mesh
from monarch_kernel.runtime.tensor.api.fetching import inspect
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.stream import Stream
from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.current_executor import here

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh


def to_mesh(tensors: object, mesh: object, stream: Stream | None = None) -> Any:
    """Copy all tensors in `tensors` to another mesh; see `Tensor.to_mesh`."""
    return tree_map(lambda t: t.to_mesh(mesh, stream) if type(t) is Tensor else t, tensors)


def slice_mesh(tensors: object, **coords: int | slice) -> Any:
    """Restrict all tensors in `tensors` to a part of their mesh; see `Tensor.slice_mesh`."""
    return tree_map(lambda t: t.slice_mesh(**coords) if type(t) is Tensor else t, tensors)


def reduce(
    tensors: object,
    dims: Sequence[str] | str,
    reduction: str = "sum",
    scatter: bool = False,
    mesh: object = None,
    _inplace: bool = False,
) -> Any:
    """Reduce all tensors in `tensors` over dimensions of their mesh; see `Tensor.reduce`."""

    def reduced(t: object) -> object:
        if type(t) is not Tensor:
            return t
        return (t.reduce_ if _inplace else t.reduce)(dims, reduction, scatter, mesh)

    return tree_map(reduced, tensors)


def reduce_(
    tensors: object, dims: Sequence[str] | str, reduction: str = "sum", scatter: bool = False, mesh: object = None
) -> Any:
    """Do the same as `reduce`, in place."""
    return reduce(tensors, dims, reduction, scatter, mesh, _inplace=True)


def show(obj: object, shard: Mapping[str, int] | None = None, **coords: int) -> None:
    """Show the values of one rank: with the notebook's display, or elsewhere as text.

    Args:
        obj, shard, coords: as for `inspect`.
    """
    getattr(builtins, "display", print)(inspect(obj, shard, **coords))  # IPython's, in a notebook


def world_mesh(ctx: object, hosts: Any, gpu_per_host: int, _processes: object = None) -> Any:
    """Spawn ``gpu_per_host`` procs on each host, with the dimensions ``host`` and ``gpu``.

    Args:
        ctx: accepted as in Monarch.
        hosts: a host mesh.
    """
    return hosts.flatten("host").spawn_procs({"gpu": gpu_per_host})


def python_local_mesh(*, gpus: int | None = None, hosts: int = 1) -> Any:
    """Spawn procs on this host, with the dimensions ``host`` and ``gpu``. They end with this process or on ``stop()``.

    Args:
        gpus: the number of procs for each of `hosts`; by default the number of GPUs of this host, or one if it has
            none.
    """
    count = torch.cuda.device_count() or 1 if gpus is None else gpus
    return this_host().spawn_procs({"host": hosts, "gpu": count})


def rank_tensor(procs: ProcMesh, dim: str) -> Any:
    """Create an int64 scalar on every rank: its coordinate in dimension `dim`."""
    mesh = tensor_mesh(procs)
    if dim not in mesh.labels:
        raise unknown_dimension(dim, mesh.labels)
    # A rank knows its position in the world. The region translates it into this mesh.
    at = {rank: point[dim] for rank, point in zip(mesh.ranks, procs.extent.points())}
    return mesh.call(_coordinate, lambda _: torch.zeros((), dtype=torch.int64), at, key=("rank_tensor", dim))


def rank_tensors(procs: ProcMesh) -> dict[str, Any]:
    """Return the coordinates of every rank, by dimension."""
    return {label: rank_tensor(procs, label) for label in procs.extent.names}


def _coordinate(at: dict[int, int]) -> torch.Tensor:
    return torch.tensor(at[here().rank], device=current_executor.of_rank())
