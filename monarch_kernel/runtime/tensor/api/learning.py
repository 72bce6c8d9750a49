"""Call functions of the ranks whose result shapes are unknown: the first call of each kind determines them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_flatten

from monarch_kernel.runtime.tensor.controller.handle import handle_of
from monarch_kernel.runtime.tensor.controller.opaque_ref import OpaqueRef
from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh
from monarch_kernel.runtime.tensor.rank.objects import Construct, ResultLike, describe_object, object_of, part_of_key

#: The key under which an engine stores learnt results.
_LEARNT = "results of functions"


def call_learnt(
    mesh: TensorMesh, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], key: Any = None
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
    known: dict[Any, ResultLike] = engine.extras.setdefault(_LEARNT, {})
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
    found: list[Any] = engine.ask(mesh, describe_object, held.key)
    likes = [ResultLike(x) for x in found]
    for place, other in enumerate(likes):
        if other.likes != likes[0].likes or other.tree != likes[0].tree:
            raise ValueError(
                f"{name}: its result on rank {place} ({found[place]}) is unlike that on rank 0 ({found[0]}) of mesh "
                f"{mesh.name}, so that no tensor can stand for both: use call(), or call_on_shard_and_fetch()"
            )
    learnt = known[kind] = likes[0]
    return mesh.call(object_of, lambda _: learnt.fake(), held, key=("object of", learnt.key))


def argument_key(x: Any) -> Any:
    """Return the key of the properties of an argument that determine the form of results."""
    handle = handle_of(x)
    return part_of_key(x) if handle is None else (type(x), handle._spec)
