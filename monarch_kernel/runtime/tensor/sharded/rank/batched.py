"""Rules for operations on a batch of independent entries: each rank computes its entries.

Examples are attention over heads, pooling over channels, convolutions, and gathering along a dimension that is not
sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from monarch_kernel.runtime.tensor.sharded.rank.layout import of_part, strides_ordered_as

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.device_mesh import DeviceMesh


# Rules for common operations for which DTensor has no rule or a wrong one, and gathering would be too costly.
#
# Each rule is built from an operation and its fallback. It selects by layouts and shapes only, because all ranks must
# select the same way.

Run = Callable[..., Any]

#: Element-wise operations that torch does not mark as such.
_POINTWISE = frozenset(
    {
        "aten::elu_backward.default",
        "aten::fill_.Tensor",
        "aten::floor_divide.default",
        "aten::floor_divide.Scalar",
        "aten::hardsigmoid_backward.default",
        "aten::hardswish.default",
        "aten::hardswish_backward.default",
        "aten::hardtanh_backward.default",
        "aten::isclose.default",
        "aten::leaky_relu_backward.default",
        "aten::log_sigmoid_backward.default",
        "aten::log_sigmoid_forward.default",
        "aten::masked_fill.Tensor",
        "aten::masked_fill_.Tensor",
        "aten::mish_backward.default",
        "aten::softplus_backward.default",
    }
)


#: Reductions over a list of dimensions, and those of them whose list is empty by default.
_OVER_DIMENSIONS = frozenset(
    {
        "aten::all.dims",
        "aten::amax.default",
        "aten::amin.default",
        "aten::any.dims",
        "aten::logsumexp.default",
        "aten::mean.dim",
        "aten::std.correction",
        "aten::sum.default",
        "aten::sum.dim_IntList",
        "aten::var.correction",
    }
)
_ALL_BY_DEFAULT = frozenset({"aten::amax.default", "aten::amin.default"})


#: Operations that reshape a tensor.
_RESHAPES = frozenset({"aten::_unsafe_view.default", "aten::view.default"})
#: Operations that fail or are incorrect on a rank without elements.
_NEED_ELEMENTS = frozenset(
    {
        "aten::_log_softmax.default",
        "aten::_log_softmax_backward_data.default",
        "aten::_softmax.default",
        "aten::_softmax_backward_data.default",
        "aten::amax.default",
        "aten::amin.default",
        "aten::argmax.default",
        "aten::argmin.default",
        "aten::index_select.default",
        "aten::logsumexp.default",
        "aten::max.dim",
        "aten::mean.default",
        "aten::mean.dim",
        "aten::median.dim",
        "aten::min.dim",
        "aten::sort.default",
        "aten::std.correction",
        "aten::topk.default",
        "aten::var.correction",
    }
)


def guarded(name: str, run: Run, fallback: Run) -> Run:
    """Return `run`, with `fallback` for layouts in which it fails on some rank."""
    fails = leaves_a_rank_empty if name in _NEED_ELEMENTS else is_cut_unevenly_twice if name in _RESHAPES else None
    if fails is None:
        return run

    def guard(x: Any, *args: Any, **kwargs: Any) -> Any:
        return (fallback if fails(x) else run)(x, *args, **kwargs)

    return guard


def is_cut_unevenly_twice(x: DTensor) -> bool:
    """Return whether several mesh dimensions split one dimension of a tensor into parts of different sizes.

    DTensor (2.13) computes the parts of a view from each mesh dimension separately.
    """
    cuts: dict[int, list[int]] = {}
    for p, ranks in zip(x.placements, x.device_mesh.shape):
        if not p.is_replicate() and not p.is_partial():
            cuts.setdefault(p.dim, []).append(ranks)  # type: ignore[attr-defined]
    return any(len(parts) > 1 and x.shape[dim] % math.prod(parts) for dim, parts in cuts.items())


def leaves_a_rank_empty(x: DTensor) -> bool:
    """Return whether some rank has no elements. The last rank has the fewest."""
    rest = list(x.shape)
    for p, ranks in zip(x.placements, x.device_mesh.shape):
        if not p.is_replicate() and not p.is_partial():
            dim: int = p.dim  # type: ignore[attr-defined]
            rest[dim] -= -(-rest[dim] // ranks) * (ranks - 1)
            if rest[dim] <= 0:
                return True
    return False


def special_rule(op: OpOverload, name: str, fallback: Run) -> Run | None:
    """Return the rule for an operation; None if there is none.

    Args:
        fallback: runs the operation on whole tensors, for layouts that the rule does not support.
    """
    if name in ("aten::argmax.default", "aten::argmin.default"):
        return _along_a_free_dimension(op, fallback)
    if name in _OVER_DIMENSIONS:
        return _over_dimensions(op, name, fallback)
    return None


def pointwise_rule(op: OpOverload, name: str, fallback: Run) -> Run | None:
    """Return the rule for an element-wise operation."""
    if name not in _POINTWISE and torch.Tag.pointwise not in op.tags:
        return None
    writes = op._schema.is_mutable

    def run(*args: Any, **kwargs: Any) -> Any:
        flat, tree = tree_flatten((list(args), kwargs))
        given = [x for x in flat if isinstance(x, DTensor)]
        shape = max((x.shape for x in given), key=len)
        if any(x.shape != shape and x.dim() for x in given):
            return fallback(*args, **kwargs)
        if writes and (args[0].shape != shape or any(p.is_partial() for p in args[0].placements)):
            return fallback(*args, **kwargs)
        template = args[0] if writes else next((x for x in given if _is_cut(x) and x.dim()), given[0])
        layout = [Replicate() if p.is_partial() else p for p in template.placements]
        everywhere = [Replicate()] * len(layout)

        def local(x: Any) -> Any:
            if not isinstance(x, DTensor):
                return x
            wanted = layout if x.dim() or not shape else everywhere
            return (x if list(x.placements) == wanted else x.redistribute(placements=wanted))._local_tensor

        local_args, local_kwargs = tree_unflatten([local(x) for x in flat], tree)
        out = op(*local_args, **local_kwargs)
        if writes:
            return args[0]
        return tree_map(
            lambda r: (
                of_part(r, template.device_mesh, layout, template.shape, template.stride())
                if isinstance(r, torch.Tensor)
                else r
            ),
            out,
        )

    return run


def _along_a_free_dimension(op: OpOverload, fallback: Run) -> Run:
    """Return the rule for argmax and similar operations, if every rank has the whole dimension."""

    def run(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None or not x.dim() or any(p.is_partial() for p in x.placements):
            return fallback(x, dim, keepdim)
        reduced = dim % x.dim()
        layout: list[Placement] = []
        for p in x.placements:
            if p.is_replicate():
                layout.append(p)
            elif type(p) is not Shard or p.dim == reduced:
                return fallback(x, dim, keepdim)
            else:
                layout.append(p if keepdim or p.dim < reduced else Shard(p.dim - 1))
        local = op(x._local_tensor, reduced, keepdim)
        shape = list(x.shape)
        shape[reduced] = 1
        if not keepdim:
            del shape[reduced]
        return of_part(local, x.device_mesh, layout, shape)

    return run


def _over_dimensions(op: OpOverload, name: str, fallback: Run) -> Run:
    """Return the rule for reductions.

    An empty list of dimensions means all dimensions, which DTensor treats as none. Booleans count as numbers.
    """
    sums = name.startswith("aten::sum")

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if sums and x.dtype is torch.bool:
            x = x.to(torch.int64)
        if args and args[0] is not None and not args[0]:
            args = (list(range(x.dim())), *args[1:])
        elif not kwargs.get("dim", True):
            kwargs = {**kwargs, "dim": list(range(x.dim()))}
        elif not args and "dim" not in kwargs and name in _ALL_BY_DEFAULT:
            args = (list(range(x.dim())),)
        return op(x, *args, **kwargs)

    return run


def _is_cut(x: DTensor) -> bool:
    return any(not p.is_replicate() for p in x.placements)


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


def batched_rule(op: OpOverload, name: str, fallback: Run) -> Run | None:
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


def _batched(op: OpOverload, dimensions: int, sized: bool, fallback: Run) -> Run:
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


def _convolution(op: OpOverload, fallback: Run) -> Run:
    """Return the rule for a batch of images with replicated filters."""

    def run(x: DTensor, weight: DTensor, bias: DTensor | None, *args: Any) -> Any:
        others = [t for t in (weight, bias) if t is not None]
        if any(not _everywhere(t) for t in others) or not _cut_below(x.placements, 1) or leaves_a_rank_empty(x):
            return fallback(x, weight, bias, *args)
        local = op(*_locals((x, weight, bias, *args)))
        return _as_strided_like(local, x.device_mesh, x.placements, [x.shape[0], *local.shape[1:]])

    return run


def _convolution_backward(op: OpOverload, fallback: Run) -> Run:
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


def _gather(op: OpOverload, fallback: Run) -> Run:
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


def _as_strided_like(
    local: torch.Tensor, mesh: DeviceMesh, layout: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Create a DTensor of a local part. The whole has the same memory order of dimensions as the part."""
    return of_part(local, mesh, layout, shape, strides_ordered_as(local, shape))
