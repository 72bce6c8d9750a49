"""Distribute, redistribute and fetch sharded tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.sharded.controller.layout import Placements, placements_of
from monarch_kernel.runtime.tensor.sharded.rank import state

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.sharded.controller.target import ShardedMesh


def distribute(tensor: torch.Tensor, target: ShardedMesh, spec: Any) -> Tensor:
    """Distribute a local tensor over the ranks and return its handle; see `monarch_kernel.distribute`."""
    if type(tensor) is Tensor:
        if tensor._spec.mesh is not target:
            raise TypeError(
                f"distribute(): the tensor is on {tensor._spec.mesh!r} already: take it here first (full_tensor()), "
                "or lay it out anew where it is (redistribute())"
            )
        return redistribute(tensor, spec)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"distribute(): {type(tensor).__name__} is no tensor: torch.as_tensor(...) makes one")
    if tensor.layout != torch.strided:
        raise TypeError(f"distribute(): a {tensor.layout} tensor: only dense ones (to_dense()) can be distributed")
    placements = placements_of(spec, target.labels, tensor, target.name)
    if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
        return _Distribute.apply(tensor, target, placements)
    made = target.put(tensor, placements)
    made.requires_grad_(tensor.requires_grad)
    return made


def redistribute(tensor: Tensor, spec: Any) -> Tensor:
    """Change the layout of a tensor. Gradients pass."""
    target = _mesh_of(tensor)
    placements = placements_of(spec, target.labels, tensor, target.name)
    return _Redistribute.apply(tensor, target, placements)


def full_tensor(tensor: Tensor) -> torch.Tensor:
    """Fetch the whole tensor, in one round trip. Gradients pass."""
    target = _mesh_of(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        return _FullTensor.apply(tensor, target)
    with _disable_current_modes():
        return target.value_of(tensor, "full_tensor()")


def to_local(tensor: Tensor, coords: dict[str, int]) -> torch.Tensor:
    """Fetch the part of one rank, in one round trip.

    Args:
        coords: the rank's coordinates by dimension of the mesh; other dimensions default to 0.
    """
    from monarch_kernel.runtime.tensor.api.fetching import rank_at

    target = _mesh_of(tensor)
    rank = rank_at(target, coords)
    engine = target.engine
    engine.plan.synchronised("to_local()")
    with _disable_current_modes():
        return engine.call_and_fetch(target, state.local_part, (tensor,), {}, rank).get()


def device_mesh(tensor: Tensor) -> Any:
    """Return the `Mesh` of a tensor."""
    return _mesh_of(tensor).owner


def placements(tensor: Tensor) -> Placements:
    """Return the layout of a tensor, a placement for each dimension of its mesh, in one round trip."""
    return _mesh_of(tensor).placements_of(tensor)


def preview(tensor: Tensor, count: int) -> str:
    """Return the `repr` and the first values, in one round trip each."""
    target = _mesh_of(tensor)
    with torch.no_grad():
        first = tensor.detach().flatten()[:count].tolist() if tensor.numel() else []
    numbers = ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in first)
    return f"{target.describe(tensor)}\n[{numbers}{', ...' if tensor.numel() > count else ''}]"


def _mesh_of(tensor: Tensor) -> ShardedMesh:
    return tensor._spec.mesh  # type: ignore[return-value]  # only handles of sharded meshes come here


class _Distribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, target: ShardedMesh, placements: Placements) -> Any:  # type: ignore[override]
        return target.put(tensor, placements)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        return full_tensor(gradient.detach()), None, None


class _Redistribute(torch.autograd.Function):
    """Redistributes a tensor. The gradient keeps its layout, because it is the gradient of the same tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, target: ShardedMesh, placements: Placements) -> Any:  # type: ignore[override]
        return target.call(
            state.redistributed, _alike, tensor, placements, key=("redistribute", placements), meets=False
        )

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        return gradient, None, None


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, target: ShardedMesh) -> torch.Tensor:  # type: ignore[override]
        ctx.target = target
        with _disable_current_modes():
            return target.value_of(tensor, "full_tensor()")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.target.put(gradient), None


def _alike(x: torch.Tensor, placements: Any) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
