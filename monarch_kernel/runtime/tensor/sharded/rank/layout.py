"""Convert between the parts of a tensor and the whole. Every rank of the mesh calls these functions together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.program import written

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.device_mesh import DeviceMesh


aten: Any = torch.ops.aten


def whole_of(x: DTensor) -> torch.Tensor:
    """Return the whole tensor on every rank, with the strides of the DTensor."""
    if all(p.is_replicate() for p in x.placements):
        return x.to_local()
    whole = x.full_tensor()
    if whole.stride() != x.stride() and whole.numel() and 0 not in x.stride():
        whole = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=whole.device).copy_(whole)
    return whole


def part_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return the DTensor of a tensor that every rank has.

    Nothing is sent. A replicated result shares memory with `whole`.
    """
    if all(p.is_replicate() for p in placements):  # DTensor would copy non-contiguous tensors
        if whole.device.type != mesh.device_type:  # as DTensor does for sharded tensors
            whole = whole.to(current_executor.of_rank())
        return dtensor_of(whole, mesh, placements, TensorMeta(whole.shape, whole.stride(), whole.dtype))
    made = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
    local = made._local_tensor
    if not whole.is_contiguous() and aten.is_non_overlapping_and_dense(whole):
        # DTensor makes parts contiguous. Views that are valid on whole tensors would then fail.
        strides = strides_ordered_as(whole, local.shape)
        if local.stride() != strides:
            ordered = torch.empty_strided(local.shape, strides, dtype=local.dtype, device=local.device)
            local = made._local_tensor = ordered.copy_(local)
    if local.numel() < whole.numel() and local.untyped_storage().nbytes() > local.numel() * local.element_size():
        made._local_tensor = local.clone()  # a part must not keep the whole alive
    return made


def strides_ordered_as(like: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor of this shape, whose dimensions have the memory order of `like`."""
    order = sorted(range(like.dim()), key=lambda d: (like.stride(d), like.size(d)), reverse=True)
    strides, step = [0] * like.dim(), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(1, shape[d])
    return tuple(strides)


def dtensor_of(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], meta: TensorMeta | None
) -> DTensor:
    """Create the DTensor with this part, sharing its memory."""
    make = DTensor
    return make(local.detach(), DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def of_part(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> DTensor:
    """Create the DTensor of this shape with this part. Gradients pass. Without strides, it is contiguous."""
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride() if stride is None else tuple(stride)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


def layout_like(result: torch.Tensor, template: DTensor) -> tuple[Placement, ...]:
    """Return the layout for a result that was computed whole: an input's layout where the input has that dimension."""
    return tuple(
        p if isinstance(p, Shard) and p.dim < result.dim() and result.size(p.dim) > 1 else Replicate()
        for p in template.placements
    )


def write(x: DTensor, whole: torch.Tensor) -> None:
    """Assign `whole` to `x`, in place and in its layout."""
    if all(p.is_replicate() for p in x.placements):
        if x._local_tensor is not whole:
            x._local_tensor.copy_(whole)
        return
    x._local_tensor.copy_(
        distribute_tensor(whole.detach(), x.device_mesh, x.placements, src_data_rank=None)._local_tensor
    )


# Run any operation on DTensors: gather its inputs, compute on whole tensors on every rank, keep this rank's part.
#
# This needs no rule and is correct for every layout, but costs the gathering. It is also the reference for checks of
# DTensor.


def run_whole(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
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

    def scattered(result: object) -> object:
        if not isinstance(result, torch.Tensor):
            return result
        original = originals.get(id(result))
        if original is not None:
            return original
        if id(result) in inputs or result._is_view() or _shares_memory(result, wholes.values()):
            result = result.clone()
        return part_of(result, template.device_mesh, layout_like(result, template))

    return tree_map(scattered, out)


def run_replicated(op: OpOverload, args: tuple[object, ...], kwargs: object) -> object:
    """Run an operation whose inputs are all replicated. It runs here as on one device, including views."""
    flat, tree = tree_flatten((list(args), kwargs))
    given = [x for x in flat if isinstance(x, DTensor)]
    originals = {id(x._local_tensor): x for x in given}
    new_args, new_kwargs = tree_unflatten([x._local_tensor if isinstance(x, DTensor) else x for x in flat], tree)
    out = op(*new_args, **new_kwargs)

    def wrapped(result: object) -> object:
        if not isinstance(result, torch.Tensor):
            return result
        return originals[id(result)] if id(result) in originals else replicated(result, given[0].device_mesh)

    return tree_map(wrapped, out)


def replicated(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor that every rank has as a DTensor."""
    return part_of(whole, mesh, [Replicate()] * mesh.ndim)


def _shares_memory(result: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    storage = result.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == storage for other in others)
