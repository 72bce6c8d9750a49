"""Rules for common operations for which DTensor has no rule or a wrong one, and gathering would be too costly.

Each rule is built from an operation and its fallback. It selects by layouts and shapes only, because all ranks must
select the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from monarch_kernel.runtime.tensor.sharded.rank.layout import of_part

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


def special_rule(op: Any, name: str, fallback: Run) -> Run | None:
    """Return the rule for an operation; None if there is none.

    Args:
        fallback: runs the operation on whole tensors, for layouts that the rule does not support.
    """
    if name in ("aten::argmax.default", "aten::argmin.default"):
        return _along_a_free_dimension(op, fallback)
    if name in _OVER_DIMENSIONS:
        return _over_dimensions(op, name, fallback)
    return None


def pointwise_rule(op: Any, name: str, fallback: Run) -> Run | None:
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


def _along_a_free_dimension(op: Any, fallback: Run) -> Run:
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


def _over_dimensions(op: Any, name: str, fallback: Run) -> Run:
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
