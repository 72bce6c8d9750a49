"""Split a set of ranks into a few slices of their mesh; each slice needs one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from monarch_kernel.actor import Extent


class Sliceable(Protocol):
    """A mesh of procs or of actors."""

    def slice(self, **within: Any) -> Any:
        """Return the mesh of the ranks within these coordinates."""
        ...


Sliced = TypeVar("Sliced", bound=Sliceable)


@dataclass(frozen=True, slots=True)
class MeshPart(Generic[Sliced]):
    """A slice of a mesh, and its ranks in order, as numbered in the whole mesh."""

    mesh: Sliced
    ranks: tuple[int, ...]


def parts(whole: Sliced, flat: Sliced, extent: Extent, ranks: Sequence[int]) -> list[MeshPart[Sliced]]:
    """Return slices that together contain exactly these ranks.

    Args:
        whole: the mesh.
        flat: the same mesh in one dimension, `ranks`.
        extent: the extent of the mesh.
        ranks: the ranks, sorted.
    """
    chosen = tuple(ranks)
    if not chosen:
        return []
    if len(chosen) == extent.nelements:
        return [MeshPart(whole, chosen)]
    box = boxed(chosen, extent)
    if box is not None:
        return [MeshPart(whole.slice(**box), chosen)]
    everyone = range(extent.nelements)
    return [MeshPart(flat.slice(ranks=run), tuple(everyone[run])) for run in runs(chosen)]


def boxed(ranks: Sequence[int], extent: Extent) -> dict[str, slice] | None:
    """Return `ranks` (sorted) as a slice of each dimension; None if they form no box."""
    slices: dict[str, slice] = {}
    count = 1
    for label, size, stride in zip(extent.names, extent.shape, extent.strides, strict=True):
        coords = sorted({rank // stride % size for rank in ranks})
        steps = {later - earlier for earlier, later in pairwise(coords)}
        if len(steps) > 1:
            return None
        slices[label] = slice(coords[0], coords[-1] + 1, steps.pop() if steps else 1)
        count *= len(coords)
    return slices if count == len(ranks) else None


def runs(ranks: Sequence[int]) -> list[slice]:
    """Return `ranks` (sorted) as a few slices of a one-dimensional mesh."""
    found: list[slice] = []
    at = 0
    while at < len(ranks):
        end = at + 1
        step = ranks[end] - ranks[at] if end < len(ranks) else 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - at == 2 and step > 1:  # two distant ranks are the end of one run and the beginning of another
            end, step = at + 1, 1
        found.append(slice(ranks[at], ranks[end - 1] + 1, step))
        at = end
    return found
