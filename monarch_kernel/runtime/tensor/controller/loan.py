"""`TensorLoan`: the handles and meshes that are met while the arguments of an endpoint are pickled.

A rank gets what it has in their places: its own value of a handle, and torch's device mesh for a `Mesh`. Handles may be
anywhere in the arguments: in containers, modules, optimizers and objects of the program.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch_kernel.runtime.actor.extensions import TensorArgument
from monarch_kernel.runtime.mesh.shape import Region
from monarch_kernel.runtime.tensor.controller.errors import MixedTensorsError
from monarch_kernel.runtime.tensor.rank.calls import lent_value
from monarch_kernel.runtime.tensor.wire import LEND

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.controller.handle import Tensor
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


class _Lent:
    """The handles of one mesh, in the order in which they were met."""

    def __init__(self, token: int, ranks: tuple[int, ...]) -> None:
        self.token = token
        self.ranks = ranks
        self.handles: list[Tensor] = []


class TensorLoan:
    """What a message lends. Pickle the message in ``with loan:``, then `send` tells the ranks what to put by.

    Args:
        procs: references of the processes that the message goes to.
    """

    def __init__(self, procs: Sequence[Any]) -> None:
        self._procs = procs
        self._lent: dict[TensorMesh, _Lent] = {}
        self._outer: TensorLoan | None = None

    def __enter__(self) -> TensorLoan:
        self._outer, _current.loan = _current.loan, self
        return self

    def __exit__(self, *exc: object) -> None:
        _current.loan = self._outer

    def take(self, handle: Tensor) -> Any:
        """How a handle is pickled.

        Raises:
            MixedTensorsError: the message goes to a process that is no rank of its mesh.
        """
        mesh = handle._spec.mesh
        lent = self._lent.get(mesh)
        if lent is None:
            ranks = self.ranks_of(mesh, handle)
            mesh.prepare_loan()
            lent = self._lent[mesh] = _Lent(mesh.engine.new_number(), ranks)
        index = next((k for k, known in enumerate(lent.handles) if known is handle), len(lent.handles))
        if index == len(lent.handles):
            lent.handles.append(handle)
        grad = handle.requires_grad if getattr(handle, "_is_param", False) else None
        return lent_value, (mesh.engine.key, lent.token, index, grad)

    def ranks_of(self, mesh: TensorMesh, what: object) -> tuple[int, ...]:
        """The ranks in the engine's world of the processes that the message goes to.

        Raises:
            MixedTensorsError: not all of them are ranks of this mesh.
        """
        ranks = ranks_in(mesh.engine, self._procs)
        if not set(ranks) <= set(mesh.ranks):
            raise MixedTensorsError(
                f"{what!r} is an argument of a call of actors that are not all on its ranks: call those on its mesh, "
                "bring it there first (to_mesh), or send "
                + ("the number (t.item())" if getattr(what, "ndim", None) == 0 else "one rank's value (inspect(t))")
            )
        return ranks

    def send(self) -> list[tuple[TensorMesh, tuple[int, ...], int]]:
        """Tell the ranks, in order with the handles' streams; returns meshes, ranks that are called, and tokens."""
        for mesh, lent in self._lent.items():
            mesh.engine.shares = True
            ids = [handle._owner.id for handle in lent.handles]
            mesh.engine.control(mesh, LEND, len(ids), *ids, len(lent.ranks), *lent.ranks, token=lent.token)
        return [(mesh, lent.ranks, lent.token) for mesh, lent in self._lent.items()]


class _Current(threading.local):
    loan: TensorLoan | None = None


_current = _Current()


def current_loan(what: object) -> TensorLoan:
    """The loan that what is being pickled belongs to.

    Raises:
        TensorArgument: none: it is pickled for something else, or by an endpoint that does not know yet that there are
            handles in its arguments.
    """
    loan = _current.loan
    if loan is None:
        raise TensorArgument(
            f"{what!r} cannot be pickled: save or send its value (fetch_shard(t).result(), t.full_tensor(), or "
            "save_checkpoint() of a module), or pass it to an endpoint of actors on its mesh"
        )
    return loan


def ranks_by_proc(engine: TensorEngine) -> dict[str, int]:
    """The rank of each process of an engine's world, by the process's id."""
    return {ref.id: rank for rank, ref in enumerate(engine.world._target().procs)}


def ranks_in(engine: TensorEngine, procs: Sequence[Any]) -> tuple[int, ...]:
    """The ranks that processes are in the engine's world; -1 for those that are none."""
    places = ranks_by_proc(engine)
    return tuple(places.get(ref.id, -1) for ref in procs)


def region_of(labels: Sequence[str], sizes: Sequence[int], ranks: tuple[int, ...]) -> Region | None:
    """The region that selects these ranks in row-major order; None if they are not evenly spaced in each dimension."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, ranks[step] - ranks[0] if size > 1 else 1)
        step *= size
    region = Region(labels, sizes, strides, ranks[0])
    return region if list(region.ranks()) == list(ranks) else None
