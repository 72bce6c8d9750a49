"""Run any operation on DTensors: gather its inputs, compute on whole tensors on every rank, keep this rank's part.

This needs no rule and is correct for every layout, but costs the gathering. It is also the reference for checks of
DTensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from monarch_kernel.runtime.tensor.rank.program import written
from monarch_kernel.runtime.tensor.sharded.rank.layout import layout_like, part_of, whole_of, write


def run_whole(op: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation on whole tensors. Results have the layout of its first sharded input."""
    flat, tree = tree_flatten((list(args), kwargs))
    given = [x for x in flat if isinstance(x, DTensor)]
    template = next((x for x in given if any(p.is_shard() for p in x.placements)), given[0])
    wholes: dict[int, torch.Tensor] = {}
    targets: list[DTensor] = [x for x in written(op, args, kwargs) if isinstance(x, DTensor)]
    for x in given:
        if id(x) not in wholes:
            whole = whole_of(x)
            # written tensors need separate memory: a failure halfway must not leave a replica changed
            wholes[id(x)] = whole.clone() if any(x is w for w in targets) and whole is x._local_tensor else whole
    new_args, new_kwargs = tree_unflatten([wholes[id(x)] if isinstance(x, DTensor) else x for x in flat], tree)
    out = op(*new_args, **new_kwargs)
    originals = {id(wholes[id(x)]): x for x in targets}
    for x in targets:
        write(x, wholes[id(x)])
    inputs = {id(w) for w in wholes.values()}

    def scattered(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        original = originals.get(id(result))
        if original is not None:
            return original
        if id(result) in inputs or result._is_view() or _shares_memory(result, wholes.values()):
            result = result.clone()
        return part_of(result, template.device_mesh, layout_like(result, template))

    return tree_map(scattered, out)


def run_replicated(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation whose inputs are all replicated. It runs here as on one device, including views."""
    flat, tree = tree_flatten((list(args), kwargs))
    given = [x for x in flat if isinstance(x, DTensor)]
    originals = {id(x._local_tensor): x for x in given}
    new_args, new_kwargs = tree_unflatten([x._local_tensor if isinstance(x, DTensor) else x for x in flat], tree)
    out = op(*new_args, **new_kwargs)

    def wrapped(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        return originals[id(result)] if id(result) in originals else replicated(result, given[0].device_mesh)

    return tree_map(wrapped, out)


def replicated(whole: torch.Tensor, mesh: Any) -> DTensor:
    """Return a tensor that every rank has as a DTensor."""
    return part_of(whole, mesh, [Replicate()] * mesh.ndim)


def _shares_memory(result: torch.Tensor, others: Any) -> bool:
    storage = result.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == storage for other in others)
