"""Create tensors on sharded meshes: each rank creates its part and keeps no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, Replicate
from torch.utils._pytree import tree_map

from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.rank.program import operation_of
from monarch_kernel.runtime.tensor.sharded.rank.layout import of_part, part_of
from monarch_kernel.runtime.tensor.sharded.rank.rules import rules_of

#: The approximate number of random numbers drawn at a time.
DRAWN = 1 << 20
#: The block size of torch's generators for normal numbers. Pieces of a multiple of this size equal those of a single
#: draw.
BLOCK = 16


def filled(
    key: object, placements: Sequence[Placement], size: Sequence[int], dtype: torch.dtype, value: Any
) -> DTensor:
    """Create a tensor filled with one number, or an uninitialised tensor if the number is None."""
    mesh = rules_of(here().store.extras).meshes[key]
    shape, _ = compute_local_shape_and_global_offset(torch.Size(size), mesh, placements)
    if value is None:
        local = torch.empty(shape, dtype=dtype, device=current_executor.of_rank())
    else:
        local = torch.full(shape, value, dtype=dtype, device=current_executor.of_rank())
    return of_part(local, mesh, placements, size)


def drawn(
    key: object, placements: Sequence[Placement], size: Sequence[int], dtype: torch.dtype, normal: bool
) -> DTensor:
    """Draw the random numbers of one device: every rank draws all of them, piece by piece, and keeps its part.

    Args:
        normal: draw from the normal distribution; otherwise uniformly from [0, 1).
    """
    rules = rules_of(here().store.extras)
    mesh = rules.meshes[key]
    draw = torch.randn if normal else torch.rand
    shape, offsets = compute_local_shape_and_global_offset(torch.Size(size), mesh, placements)
    local = torch.empty(shape, dtype=dtype, device=current_executor.of_rank())
    rows = _rows_at_a_time(size)
    with rules.generator.active(local.device):
        if rows is None:
            whole = draw(*size, dtype=dtype, device=local.device)
            local.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offsets, shape))])
        else:
            inner = tuple(slice(o, o + n) for o, n in zip(offsets[1:], shape[1:]))
            first, last = offsets[0], offsets[0] + shape[0]
            for begin, end in _pieces(size[0], rows):
                piece = draw(end - begin, *size[1:], dtype=dtype, device=local.device)
                low, high = max(begin, first), min(end, last)
                if low < high:
                    local[low - first : high - first] = piece[(slice(low - begin, high - begin), *inner)]
    return of_part(local, mesh, placements, size)


def counted(key: object, placements: Sequence[Placement], dtype: torch.dtype, bounds: tuple[Any, Any, Any]) -> DTensor:
    """Create ``torch.arange(*bounds)``."""
    mesh = rules_of(here().store.extras).meshes[key]
    return part_of(torch.arange(*bounds, dtype=dtype, device=current_executor.of_rank()), mesh, placements)


def made_whole(key: object, name: str, args: tuple[object, ...], kwargs: dict[str, object], random: bool) -> object:
    """Run a torch operation without tensor arguments. Its result is replicated on every rank."""
    rules = rules_of(here().store.extras)
    mesh = rules.meshes[key]
    operation = operation_of(name)
    kwargs = {**kwargs, "device": current_executor.of_rank()} if "device" in kwargs else kwargs
    if random:
        with rules.generator.active(current_executor.of_rank()):
            made = operation(*args, **kwargs)
    else:
        made = operation(*args, **kwargs)
    layout = [Replicate()] * mesh.ndim
    return tree_map(lambda x: part_of(x, mesh, layout) if isinstance(x, torch.Tensor) else x, made)


def _rows_at_a_time(size: Sequence[int]) -> int | None:
    """Return how many rows to draw together; None if all rows must be drawn together."""
    if not size:
        return None
    width = 1
    for n in size[1:]:
        width *= n
    rows = max(1, DRAWN // max(width, 1) // BLOCK) * BLOCK
    return rows if current_executor.of_rank().type == "cpu" and size[0] >= 2 * rows else None


def _pieces(count: int, rows: int) -> list[tuple[int, int]]:
    """Split rows into pieces. The last piece is at least one block, because smaller ones are drawn differently."""
    begins = list(range(0, count - rows + 1, rows))
    return list(zip(begins, [*begins[1:], count]))
