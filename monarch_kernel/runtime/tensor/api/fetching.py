"""Fetch values from ranks: ``fetch_shard``, ``inspect``, ``call_on_shard_and_fetch``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._pytree import tree_flatten

from monarch_kernel.runtime.actor.calls.endpoint import Endpoint
from monarch_kernel.runtime.tensor.api.activation import tensor_mesh
from monarch_kernel.runtime.tensor.controller.engine import handles_in
from monarch_kernel.runtime.tensor.controller.errors import MixedTensorsError
from monarch_kernel.runtime.tensor.controller.fetched_values import FetchedValues
from monarch_kernel.runtime.tensor.controller.handle import handle_of
from monarch_kernel.runtime.tensor.controller.opaque_ref import OpaqueRef
from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh
from monarch_kernel.runtime.tensor.rank.objects import Construct, ResultLike, describe_object, object_of, part_of_key

# Call functions of the ranks whose result shapes are unknown: the first call of each kind determines them.

#: The key under which an engine stores learnt results.
_LEARNT = "results of functions"


def call_learnt(
    mesh: TensorMesh,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, Any],
    key: object = None,
) -> Any:
    """Call a function on the ranks. The first call of each kind waits to learn the form of the result.

    Each call runs the function once.

    Parts of the result that are not tensors come from the first rank in the first call of a kind.

    Args:
        key: identifies functions that are created again for each call.

    Raises:
        RemoteException: the function failed in the first call of a kind.
        ValueError: the results of the ranks differ in shape.
    """
    engine = mesh.engine
    known: dict[object, ResultLike] = engine.extras.setdefault(_LEARNT, {})
    flat, tree = tree_flatten((args, kwargs))
    key = function if key is None else key
    kind = mesh, key, tree, tuple(map(argument_key, flat))
    like = known.get(kind)
    if like is not None:
        wanted = like
        return mesh.call(function, lambda *_, **__: wanted.fake(), *args, **kwargs, key=("learnt", key, like.key))
    if engine.recording is not None:
        engine.recording.stop("it learns what a function of the ranks gives")
    name = getattr(function, "__name__", str(function))
    held = mesh.call(Construct(function), lambda *_, **__: OpaqueRef(), *args, **kwargs, key=("learn", key))
    engine.plan.synchronised(f"the shapes of {name}")
    found: list[object] = engine.ask(mesh, describe_object, held.key)
    likes = [ResultLike(x) for x in found]
    for place, other in enumerate(likes):
        if other.likes != likes[0].likes or other.tree != likes[0].tree:
            raise ValueError(
                f"{name}: its result on rank {place} ({found[place]}) is unlike that on rank 0 ({found[0]}) of mesh "
                f"{mesh.name}, so that no tensor can stand for both: use call(), or call_on_shard_and_fetch()"
            )
    learnt = known[kind] = likes[0]
    return mesh.call(object_of, lambda _: learnt.fake(), held, key=("object of", learnt.key))


def argument_key(x: object) -> object:
    """Return the key of the properties of an argument that determine the form of results."""
    handle = handle_of(x)
    return part_of_key(x) if handle is None else (type(x), handle._spec)


def fetch_shard(obj: object, shard: Mapping[str, int] | None = None, **coords: int) -> FetchedValues:
    """Return a future of the values of one rank.

    Args:
        obj: a handle, or nested lists, tuples and dicts with handles, all of one mesh.
        shard, coords: the rank's coordinates, such as ``gpus=1``; other dimensions default to 0.

    Raises:
        IndexError: a coordinate is out of range.
        KeyError: the mesh has no such dimension.
        MixedTensorsError: handles of several meshes.
    """
    mesh = mesh_of_all(obj)
    return mesh.engine.fetch(mesh, obj, rank_at(mesh, {**(shard or {}), **coords}))


def inspect(obj: object, shard: Mapping[str, int] | None = None, **coords: int) -> Any:
    """Return the values of one rank, like ``fetch_shard(...).result()``."""
    __tracebackhide__ = True
    return fetch_shard(obj, shard, **coords).get()


def call_on_shard_and_fetch(
    function: Callable[..., object], *args: object, shard: Mapping[str, int] | None = None, **kwargs: object
) -> Any:
    """Call ``function(*args, **kwargs)`` on the ranks, in order with their operations.

    Return a future of one rank's result.

    Unlike with ``remote``, the result may be any picklable object, and its shapes need not be known.

    Args:
        function: a function, which receives tensors in place of handles; a result of ``remote``; or an endpoint of
            actors, of which only the actor at these coordinates is called.
        shard: coordinates of the rank whose result is fetched; other dimensions default to 0.
    """
    if isinstance(function, Endpoint):
        return function.at(dict(shard or {})).call_one(*args, **kwargs)
    function = getattr(function, "function", function)
    mesh = mesh_of_all((args, kwargs))
    rank = rank_at(mesh, dict(shard or {}))
    return mesh.engine.call_and_fetch(mesh, function, args, kwargs, rank)


def mesh_of_all(obj: object) -> TensorMesh:
    """Return the mesh of all handles in `obj`, or the active mesh if there are none.

    Raises:
        MixedTensorsError: the handles belong to several meshes.
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
    """Return the rank of a mesh at these coordinates. Other dimensions default to 0."""
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
