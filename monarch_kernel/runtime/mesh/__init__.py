"""Shapes of meshes and values over them. Pure values: no I/O, and no imports from the rest of this project."""

from typing import TYPE_CHECKING, Any

from monarch_kernel.runtime.mesh.ndslice import NDSlice
from monarch_kernel.runtime.mesh.rankset import format_points, format_ranks, parse_ranks
from monarch_kernel.runtime.mesh.shape import Extent, MeshTrait, Point, Region, Shape, UnknownDimensionError
from monarch_kernel.runtime.mesh.valuemesh import ValueMesh

if TYPE_CHECKING:
    from monarch_kernel.runtime.mesh.selection import Selection

__all__ = [
    "Extent",
    "MeshTrait",
    "NDSlice",
    "Point",
    "Region",
    "Selection",
    "Shape",
    "UnknownDimensionError",
    "ValueMesh",
    "format_points",
    "format_ranks",
    "parse_ranks",
]


def __getattr__(name: str) -> Any:
    if name == "Selection":  # few programs use it
        from monarch_kernel.runtime.mesh.selection import Selection

        return Selection
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
