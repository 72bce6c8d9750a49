"""Shapes of meshes and values over them. Pure values: no I/O, and no imports from the rest of this project."""

from monarch_kernel.runtime.mesh.ndslice import NDSlice, Shape
from monarch_kernel.runtime.mesh.rankset import format_points, format_ranks, parse_ranks
from monarch_kernel.runtime.mesh.selection import Selection
from monarch_kernel.runtime.mesh.shape import Extent, MeshTrait, Point, Region, UnknownDimensionError
from monarch_kernel.runtime.mesh.valuemesh import ValueMesh

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
