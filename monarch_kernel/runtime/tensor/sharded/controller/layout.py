"""Convert the layouts that a program writes to DTensor's placements (one per dimension of the mesh).

A program may name a mesh dimension for each dimension of the tensor, as in Monarch and JAX (``["data", None]`` shards
dimension 0 along the mesh dimension "data"), or use DTensor's placements (``[Shard(0), Replicate()]``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

Placements = tuple[Placement, ...]


def placements_of(spec: Any, labels: tuple[str, ...], tensor: torch.Tensor, mesh: str) -> Placements:
    """Return the placements that `spec` describes for a tensor.

    Args:
        spec: None (replicated); or, for each dimension of the tensor, a name, a tuple of names or None; or, for each
            dimension of the mesh, a placement of DTensor.
        labels: the names of the mesh's dimensions.
        mesh: the mesh's name, for errors.

    Raises:
        ValueError: `spec` names a dimension that the mesh does not have, names a dimension twice, or has the wrong
            length.
        IndexError: `spec` shards a dimension that the tensor does not have.
        TypeError: `spec` has another form.
    """
    if spec is None:
        return (Replicate(),) * len(labels)
    if isinstance(spec, (str, Placement)):
        spec = [spec]
    if not isinstance(spec, Sequence):
        raise TypeError(
            f"sharding_spec={spec!r}: give a list with a name of the mesh's dimensions or None for each dimension of "
            f"the tensor, such as [{labels[0]!r}, None], or placements such as [Shard(0)]"
        )
    items: list[Any] = list(spec)
    if any(isinstance(item, Placement) for item in items):
        return _by_mesh_dimension(items, labels, tensor, mesh)
    return _by_tensor_dimension(items, labels, tensor, mesh)


def _by_mesh_dimension(items: list[Any], labels: tuple[str, ...], tensor: torch.Tensor, mesh: str) -> Placements:
    if len(items) != len(labels):
        raise ValueError(
            f"{len(items)} placements for mesh {mesh} of {len(labels)} dimensions ({', '.join(labels)}): "
            f"give one for each"
        )
    found: list[Placement] = []
    for item in items:
        if item is None:
            item = Replicate()
        if not isinstance(item, Placement):
            raise TypeError(
                f"{item!r} among placements: give Shard(dim), Replicate() or Partial() for each mesh dimension"
            )
        if isinstance(item, Shard):
            item = Shard(_dimension(item.dim, tensor))
        elif isinstance(item, Partial) and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"a tensor of {tensor.dtype} cannot be split into terms (Partial): only floating-point ones"
            )
        found.append(item)
    return tuple(found)


def _by_tensor_dimension(items: list[Any], labels: tuple[str, ...], tensor: torch.Tensor, mesh: str) -> Placements:
    if len(items) > tensor.dim():
        raise IndexError(
            f"sharding_spec {items} has {len(items)} entries, but the tensor has {tensor.dim()} dimensions "
            f"({list(tensor.shape)})"
        )
    found: list[Placement] = [Replicate()] * len(labels)
    for dim, names in enumerate(items):
        for name in (names,) if isinstance(names, str) or names is None else tuple(names):
            if name is None:
                continue
            if name not in labels:
                raise ValueError(f"mesh {mesh} has no dimension {name!r}: it has {', '.join(labels)}")
            at = labels.index(name)
            if not found[at].is_replicate():
                raise ValueError(f"sharding_spec {items} names mesh dimension {name!r} twice")
            found[at] = Shard(dim)
    return tuple(found)


def _dimension(dim: int, tensor: torch.Tensor) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"Shard({dim}): the tensor has {tensor.dim()} dimensions ({list(tensor.shape)})")
    return dim % tensor.dim()
