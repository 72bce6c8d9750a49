"""Describe for tools the values that a rank holds: their memory, and the rank's part of one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from monarch_kernel.runtime.tensor.rank.current_executor import here


class HeldValue(NamedTuple):
    """A value on a rank.

    Attributes:
        number: the number of the value.
        storage: identifies its memory; views share it.
        nbytes: the size of that memory.
        device: the device of the memory.
    """

    number: int
    storage: int
    nbytes: int
    device: str


def held_here() -> list[HeldValue]:
    """Describe the tensors that this rank holds. Their elements are not read."""
    found: list[HeldValue] = []
    for number, value in sorted(here().store.values.items()):
        local = getattr(value, "_local_tensor", value)
        local = getattr(local, "elem", local)
        if isinstance(local, torch.Tensor):
            storage = local.untyped_storage()
            found.append(HeldValue(number, storage._cdata, storage.nbytes(), str(local.device)))
    return found


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A rank's part of a tensor.

    Attributes:
        shape: the shape of the part.
        offsets: its start in the whole tensor.
        placements: the placements of a sharded tensor, one per dimension of its mesh; empty if each rank has a separate
            tensor.
        partial: whether it is a term of a pending sum (or another reduction).
        nbytes: the size of its elements.
        device: the device of the elements.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    placements: tuple[str, ...]
    partial: bool
    nbytes: int
    device: str


def part_here(value: torch.Tensor) -> TensorPart:
    """Describe this rank's part of a value, without a collective and without reading elements."""
    placements = getattr(value, "placements", None)
    if placements is None:
        offsets = (0,) * value.dim()
        return TensorPart(
            tuple(value.shape), offsets, (), False, value.numel() * value.element_size(), str(value.device)
        )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local: torch.Tensor = value._local_tensor  # pyright: ignore[reportAttributeAccessIssue]  # of a DTensor
    mesh = value.device_mesh  # pyright: ignore[reportAttributeAccessIssue]  # of a DTensor
    _, offsets = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    return TensorPart(
        tuple(local.shape),
        tuple(offsets),
        tuple(map(placement_text, placements)),
        any(each.is_partial() for each in placements),
        local.numel() * local.element_size(),
        str(local.device),
    )


def placement_text(placement: Any) -> str:
    """Format a placement as `Shard(0)`, `Replicate()` or `Partial('sum')`."""
    if placement.is_shard():
        return f"Shard({placement.dim})"
    if placement.is_replicate():
        return "Replicate()"
    return f"Partial({getattr(placement, 'reduce_op', 'sum')!r})" if placement.is_partial() else str(placement)
