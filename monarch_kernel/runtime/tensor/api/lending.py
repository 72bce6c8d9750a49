"""Tensors of a mesh as arguments of endpoints of actors on its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._pytree import tree_map

from monarch_kernel.runtime.tensor.controller.engine import handles_in
from monarch_kernel.runtime.tensor.controller.errors import MixedTensorsError
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh
from monarch_kernel.runtime.tensor.rank.lent import lent_value
from monarch_kernel.runtime.tensor.wire.records import LEND


class _LentValue:
    """In place of a handle in a message: on the rank it is unpickled as the rank's value."""

    def __init__(self, engine: str, token: int, index: int, count: int) -> None:
        self._where = engine, token, index, count

    def __reduce__(self) -> Any:
        return lent_value, self._where


def lend_arguments(procs: Sequence[Any], arguments: Any) -> Any:
    """The arguments of a call with what the ranks have in place of handles, in order with the handles' streams.

    An actor gets the value itself and not a copy. Operations that are issued after the call may run while the endpoint
    does: wait for the call before you write the tensor in place.

    Args:
        procs: the processes that are called.

    Raises:
        MixedTensorsError: an actor is in a process that is no rank of a tensor's mesh.
    """
    by_mesh: dict[TensorMesh, list[Tensor]] = {}
    for handle in handles_in(arguments):
        by_mesh.setdefault(handle._spec.mesh, []).append(handle)
    found: dict[int, _LentValue] = {}
    for mesh, handles in by_mesh.items():
        engine = mesh.engine
        places = {ref.id: rank for rank, ref in enumerate(engine.world._target().procs)}
        ranks = [places.get(ref.id, -1) for ref in procs]
        if not set(ranks) <= set(mesh.ranks):
            raise MixedTensorsError(
                f"{handles[0]!r} is an argument of a call of actors that are not all on its ranks: call those on its "
                "mesh, or bring it there first (to_mesh)"
            )
        ids = [handle._owner.id for handle in handles]
        token = engine.control(mesh, LEND, len(ids), *ids, len(ranks), *ranks)
        for index, handle in enumerate(handles):
            found[id(handle)] = _LentValue(engine.key, token, index, len(handles))
    return tree_map(lambda x: found[id(x)] if type(x) is Tensor else x, arguments)
