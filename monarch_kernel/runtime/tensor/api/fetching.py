"""Values of ranks, here: ``fetch_shard``, ``inspect``, ``call_on_shard_and_fetch``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from monarch_kernel.runtime.actor.calls.endpoint import Endpoint
from monarch_kernel.runtime.tensor.api.activation import tensor_mesh
from monarch_kernel.runtime.tensor.controller.engine import handles_in
from monarch_kernel.runtime.tensor.controller.errors import MixedTensorsError
from monarch_kernel.runtime.tensor.controller.fetched_values import FetchedValues
from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


def fetch_shard(obj: Any, shard: Mapping[str, int] | None = None, **coords: int) -> FetchedValues:
    """The values of one rank; a future.

    Args:
        obj: a handle, or nested lists, tuples and dicts with handles, all of one mesh.
        shard, coords: the rank's coordinates, such as ``gpus=1``; dimensions that are not named are 0.

    Raises:
        IndexError: a coordinate is out of range.
        KeyError: the mesh has no such dimension.
        MixedTensorsError: handles of several meshes.
    """
    mesh = mesh_of_all(obj)
    return mesh.engine.fetch(mesh, obj, rank_at(mesh, {**(shard or {}), **coords}))


def inspect(obj: Any, shard: Mapping[str, int] | None = None, **coords: int) -> Any:
    """The values of one rank, as ``fetch_shard(...).result()`` gives them."""
    __tracebackhide__ = True
    return fetch_shard(obj, shard, **coords).get()


def call_on_shard_and_fetch(
    function: Callable[..., Any], *args: Any, shard: Mapping[str, int] | None = None, **kwargs: Any
) -> Any:
    """Call ``function(*args, **kwargs)`` on the ranks, in order with their operations; a future of one's result.

    Unlike ``remote``, the result may be anything that can be pickled, and no shapes need be known.

    Args:
        function: gets tensors in place of handles; or what ``remote`` made of one; or an endpoint of actors, of which
            only the one at these coordinates is called.
        shard: coordinates of the rank whose result is fetched; dimensions that are not named are 0.
    """
    if isinstance(function, Endpoint):
        return function.at(dict(shard or {})).call_one(*args, **kwargs)
    function = getattr(function, "function", function)
    mesh = mesh_of_all((args, kwargs))
    rank = rank_at(mesh, dict(shard or {}))
    return mesh.engine.call_and_fetch(mesh, function, args, kwargs, rank)


def mesh_of_all(obj: Any) -> TensorMesh:
    """The mesh of all handles in `obj`; the active one if there are none.

    Raises:
        MixedTensorsError: they are of several meshes.
    """
    handles = handles_in(obj)
    if not handles:
        return tensor_mesh()
    mesh = handles[0]._spec.mesh
    for handle in handles:
        if handle._spec.mesh is not mesh:
            raise MixedTensorsError(
                f"tensors of different meshes, {mesh!r} and {handle._spec.mesh!r}: fetch them one by one, or bring "
                "them together first (to_mesh, stream.borrow)"
            )
    return mesh


def rank_at(mesh: TensorMesh, coords: dict[str, int]) -> int:
    """The rank of a mesh at these coordinates; dimensions that are not named are 0."""
    rank = 0
    coords = dict(coords)
    for label, size in zip(mesh.labels, mesh.sizes):
        at = operator.index(coords.pop(label, 0))
        if not 0 <= at < size:
            raise IndexError(f"{label}={at} is out of range: mesh {mesh.name} has {label}={size}, counted from 0")
        rank = rank * size + at
    if coords:
        raise KeyError(
            f"mesh {mesh.name} has no dimension {', '.join(map(repr, coords))}: "
            f"it has {', '.join(mesh.labels) or 'none'}"
        )
    return rank
