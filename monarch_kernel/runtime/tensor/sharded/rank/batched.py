"""Rules for operations on a batch of independent entries: each rank computes its entries.

Examples are attention over heads, pooling over channels, convolutions, and gathering along a dimension that is not
sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Shard
from torch.utils._pytree import tree_leaves, tree_map

from monarch_kernel.runtime.tensor.sharded.rank.layout import of_part, strides_ordered_as
from monarch_kernel.runtime.tensor.sharded.rank.special import leaves_a_rank_empty

Run = Callable[..., Any]

#: Operations and the number of leading batch dimensions, in all inputs and results.
_BATCHED = {
    "aten::_scaled_dot_product_flash_attention_for_cpu.default": 2,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward.default": 2,
    "aten::max_pool2d_with_indices.default": 2,
    "aten::max_pool2d_with_indices_backward.default": 2,
    "aten::avg_pool2d.default": 2,
    "aten::avg_pool2d_backward.default": 2,
    "aten::_adaptive_avg_pool2d.default": 2,
    "aten::_adaptive_avg_pool2d_backward.default": 2,
    "aten::upsample_nearest1d.default": 2,
    "aten::upsample_nearest1d_backward.default": 2,
    "aten::upsample_nearest2d.default": 2,
    "aten::upsample_nearest2d_backward.default": 2,
    "aten::upsample_bilinear2d.default": 2,
    "aten::upsample_bilinear2d_backward.default": 2,
}
#: Backward operations with an argument at this position for the size of the global result. Its first entries are the
#: batch dimensions.
_SIZES_AT = 2
_SIZED = frozenset(
    {
        "aten::upsample_nearest1d_backward.default",
        "aten::upsample_nearest2d_backward.default",
        "aten::upsample_bilinear2d_backward.default",
    }
)


def batched_rule(op: Any, name: str, fallback: Run) -> Run | None:
    """Return the rule for a batched operation; None for others."""
    if name in _BATCHED:
        return _batched(op, _BATCHED[name], name in _SIZED, fallback)
    if name == "aten::convolution.default":
        return _convolution(op, fallback)
    if name == "aten::convolution_backward.default":
        return _convolution_backward(op, fallback)
    if name == "aten::gather.default":
        return _gather(op, fallback)
    return None


def _batched(op: Any, dimensions: int, sized: bool, fallback: Run) -> Run:
    def run(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
        first = given[0]
        layout = first.placements
        if (
            any(x.placements != layout or x.shape[:dimensions] != first.shape[:dimensions] for x in given)
            or first.dim() <= dimensions
            or not _cut_below(layout, dimensions)
            or leaves_a_rank_empty(first)
        ):
            return fallback(*args, **kwargs)
        if sized:
            local_size = [*first._local_tensor.shape[:dimensions], *args[_SIZES_AT][dimensions:]]
            args = (*args[:_SIZES_AT], local_size, *args[_SIZES_AT + 1 :])
        out = op(*_locals(args), **_locals(kwargs))

        def wrapped(local: Any) -> Any:
            if not isinstance(local, torch.Tensor):
                return local
            shape = [*first.shape[:dimensions], *local.shape[dimensions:]]
            return _as_strided_like(local, first.device_mesh, layout, shape)

        return tree_map(wrapped, out)

    return run


def _convolution(op: Any, fallback: Run) -> Run:
    """Return the rule for a batch of images with replicated filters."""

    def run(x: DTensor, weight: DTensor, bias: DTensor | None, *args: Any) -> Any:
        others = [t for t in (weight, bias) if t is not None]
        if any(not _everywhere(t) for t in others) or not _cut_below(x.placements, 1) or leaves_a_rank_empty(x):
            return fallback(x, weight, bias, *args)
        local = op(*_locals((x, weight, bias, *args)))
        return _as_strided_like(local, x.device_mesh, x.placements, [x.shape[0], *local.shape[1:]])

    return run


def _convolution_backward(op: Any, fallback: Run) -> Run:
    """Return the rule for gradients of a convolution. Gradients of filters are sums over the ranks of a batch."""

    def run(gradient: DTensor, x: DTensor, weight: DTensor, *args: Any) -> Any:
        if (
            not _everywhere(weight)
            or gradient.placements != x.placements
            or not _cut_below(x.placements, 1)
            or leaves_a_rank_empty(x)
        ):
            return fallback(gradient, x, weight, *args)
        dx, dw, db = op(*_locals((gradient, x, weight, *args)))
        terms = [Partial() if p.is_shard() else p for p in x.placements]
        mesh = x.device_mesh
        return (
            None if dx is None else _as_strided_like(dx, mesh, x.placements, x.shape),
            None if dw is None else _as_strided_like(dw, mesh, terms, weight.shape),
            None if db is None else of_part(db, mesh, terms, db.shape),
        )

    return run


def _gather(op: Any, fallback: Run) -> Run:
    """Return the rule for gathering along a dimension that is not sharded, from equally sharded tensors."""

    def run(x: DTensor, dim: int, index: DTensor, **kwargs: Any) -> Any:
        free = dim % max(x.dim(), 1)
        layout = index.placements
        if (
            x.placements != layout
            or x.dim() != index.dim()
            or any(p.is_partial() for p in layout)
            or any(type(p) is not Shard or p.dim == free for p in layout if not p.is_replicate())
            or any(x.shape[p.dim] != index.shape[p.dim] for p in layout if isinstance(p, Shard))
        ):
            return fallback(x, dim, index, **kwargs)
        return of_part(op(*_locals((x, dim, index)), **kwargs), x.device_mesh, layout, index.shape)

    return run


def _locals(tree: Any) -> Any:
    return tree_map(lambda x: x._local_tensor if isinstance(x, DTensor) else x, tree)


def _everywhere(x: DTensor) -> bool:
    return all(p.is_replicate() for p in x.placements)


def _cut_below(layout: Sequence[Placement], dimensions: int) -> bool:
    """Return whether only the first dimensions are sharded."""
    return all(p.is_replicate() or (type(p) is Shard and p.dim < dimensions) for p in layout)


def _as_strided_like(local: torch.Tensor, mesh: Any, layout: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Create a DTensor of a local part. The whole has the same memory order of dimensions as the part."""
    return of_part(local, mesh, layout, shape, strides_ordered_as(local, shape))
