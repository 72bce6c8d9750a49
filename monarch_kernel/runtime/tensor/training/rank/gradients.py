"""Sum gradients over ranks, each once, into the layout of its parameter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from monarch_kernel.runtime.tensor.sharded.rank.counts import counts
from monarch_kernel.runtime.tensor.sharded.rank.layout import of_part


def reduced(gradients: list[DTensor], parameters: list[DTensor]) -> list[DTensor]:
    """Return the gradients in the layouts of their parameters.

    Gradients with sums over the same dimensions of the mesh are sent together.
    """
    results = list(gradients)
    together: dict[Any, list[int]] = {}
    for i, (gradient, parameter) in enumerate(zip(gradients, parameters)):
        if gradient.placements == parameter.placements:
            continue
        counts.moved(gradient.placements, parameter.placements, gradient.numel() * gradient.element_size())
        dims = _summed(gradient, parameter)
        if dims is None:
            results[i] = gradient.redistribute(placements=parameter.placements)
        else:
            together.setdefault((gradient.device_mesh, dims, gradient.dtype), []).append(i)
    for (mesh, dims, _), members in together.items():
        parts = [gradients[i]._local_tensor for i in members]
        flat = torch.cat([part.reshape(-1) for part in parts])
        for dim in dims:
            torch.distributed.all_reduce(flat, group=mesh.get_group(dim))
        for i, part, summed in zip(members, parts, flat.split([part.numel() for part in parts])):
            local, gradient = summed.view(part.shape), gradients[i]
            results[i] = of_part(local, mesh, parameters[i].placements, gradient.shape, gradient.stride())
    return results


def _summed(gradient: DTensor, parameter: DTensor) -> tuple[int, ...] | None:
    """Return the dimensions of the mesh over which to sum, if no other change is needed; otherwise None."""
    dims: list[int] = []
    for dim, (given, wanted) in enumerate(zip(gradient.placements, parameter.placements)):
        if given == wanted:
            continue
        if not (wanted.is_replicate() and isinstance(given, Partial) and given.reduce_op == "sum"):
            return None
        dims.append(dim)
    return tuple(dims)
