"""Operations that a sharded mesh makes of others, since DTensor gets them wrong: their parts it gets right.

`mse_loss` and the like give gradients multiplied by the number of shards, and wrong values where shards are uneven.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions

aten: Any = torch.ops.aten

_BY_TORCH = (
    aten.mse_loss,
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
)


def _max(x: Any) -> Any:
    return x.amax()


def _min(x: Any) -> Any:
    return x.amin()


def _vector_norm(
    x: Any,
    ord: float = 2,  # noqa: A002  # as in the schema
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    """As numpy defines it. In DTensor, shards without elements stop the ranks that have them."""
    y = x.abs() if dtype is None else x.to(dtype).abs()
    dims = list(range(y.dim())) if dim is None else dim
    if ord == float("inf"):
        return y.amax(dims, keepdim)
    if ord == float("-inf"):
        return y.amin(dims, keepdim)
    if ord == 0:
        return (y != 0).to(y.dtype).sum(dims, keepdim)
    if ord == 1:
        return y.sum(dims, keepdim)
    if ord == 2:
        return (y * y).sum(dims, keepdim).sqrt()
    return (y**ord).sum(dims, keepdim) ** (1.0 / ord)


def _equal(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def composed() -> dict[Any, Callable[..., Any]]:
    """What to call in place of each such operation."""
    found: dict[Any, Callable[..., Any]] = dict(get_decompositions(_BY_TORCH))
    found[aten.equal.default] = _equal
    found[aten.max.default] = _max
    found[aten.min.default] = _min
    found[aten.linalg_vector_norm.default] = _vector_norm
    return found
