"""Where a rank is, as tensors: ``rank_tensor`` and ``rank_tensors`` of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from monarch_kernel.runtime.mesh.shape import unknown_dimension
from monarch_kernel.runtime.tensor.api.activation import tensor_mesh
from monarch_kernel.runtime.tensor.rank import device
from monarch_kernel.runtime.tensor.rank.current_worker import here

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh


def rank_tensor(procs: ProcMesh, dim: str) -> Any:
    """A number on every rank: its coordinate in dimension `dim` (int64)."""
    mesh = tensor_mesh(procs)
    if dim not in mesh.labels:
        raise unknown_dimension(dim, mesh.labels)
    region = procs._region
    position = mesh.labels.index(dim)
    # A rank knows its place in the world; the region says where that is in this mesh.
    stride, size = _stride(mesh.sizes, position), mesh.sizes[position]
    at = {rank: place // stride % size for place, rank in enumerate(region.ranks())}
    return mesh.call(_coordinate, lambda _: torch.zeros((), dtype=torch.int64), at, key=("rank_tensor", dim))


def rank_tensors(procs: ProcMesh) -> dict[str, Any]:
    """The coordinates of every rank, by dimension."""
    return {label: rank_tensor(procs, label) for label in procs.extent.names}


def _stride(sizes: tuple[int, ...], position: int) -> int:
    stride = 1
    for size in sizes[position + 1 :]:
        stride *= size
    return stride


def _coordinate(at: dict[int, int]) -> torch.Tensor:
    return torch.tensor(at[here().rank], device=device.of_rank())
