"""`OfferedTensor`: what stands for a tensor that an actor or a cell of a rank offers to the controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OfferedLayout:
    """How a DTensor is laid out.

    Attributes:
        ranks, sizes, labels: its device mesh: ranks of the default process group in row-major order, how many there are
            in each dimension, and the dimensions' names, if they have any.
        placements: one for each dimension of the mesh.
        rank: the rank that offers it.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    labels: tuple[str, ...] | None
    placements: tuple[Any, ...]
    rank: int


@dataclass(frozen=True)
class OfferedTensor:
    """A tensor that stays on its rank until `adopt` makes handles of it.

    Attributes:
        proc: the process that has it.
        number: by what that process knows it.
        size, stride, dtype: of the tensor; of a DTensor, those of the whole.
        layout: of a DTensor; None for another tensor.
    """

    proc: str
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    layout: OfferedLayout | None

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        layout = "" if self.layout is None else f", {list(self.layout.placements)}"
        return f"OfferedTensor({list(self.size)}, {dtype}{layout})"
