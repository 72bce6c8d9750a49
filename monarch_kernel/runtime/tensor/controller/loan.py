"""Collect the handles and meshes among the pickled arguments of an endpoint: `TensorLoan`.

In their place, a rank receives its own value of a handle, and torch's device mesh for a `Mesh`. Handles may be anywhere
in the arguments: in containers, modules, optimizers and objects of the program.
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
    """The handles of one mesh, in pickling order."""

    def __init__(self, token: int, ranks: tuple[int, ...]) -> None:
        self.token = token
        self.ranks = ranks
        self.handles: list[Tensor] = []


class TensorLoan:
    """The values that a message lends.

    Pickle the message in ``with loan:``. Then `send` tells the ranks which values to store.

    Args:
        procs: references to the processes that receive the message.
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
        """Return the pickled form of a handle.

        Raises:
            MixedTensorsError: a receiver of the message is not a rank of the handle's mesh.
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
        """Return the ranks of the message's receivers in the engine's world.

        Raises:
            MixedTensorsError: a receiver is not a rank of this mesh.
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
        """Send the loans to the ranks, in order with the handles' streams. Return meshes, called ranks, and tokens."""
        for mesh, lent in self._lent.items():
            mesh.engine.shares = True
            ids = [handle._owner.id for handle in lent.handles]
            mesh.engine.control(mesh, LEND, len(ids), *ids, len(lent.ranks), *lent.ranks, token=lent.token)
        return [(mesh, lent.ranks, lent.token) for mesh, lent in self._lent.items()]


class _Current(threading.local):
    loan: TensorLoan | None = None


_current = _Current()


def current_loan(what: object) -> TensorLoan:
    """Return the loan of the current pickling.

    Raises:
        TensorArgument: there is none: the tensor is pickled for another purpose, or by an endpoint that has not
            detected the handles in its arguments yet.
    """
    loan = _current.loan
    if loan is None:
        raise TensorArgument(
            f"{what!r} cannot be pickled: save or send its value (fetch_shard(t).result(), t.full_tensor(), or "
            "save_checkpoint() of a module), or pass it to an endpoint of actors on its mesh"
        )
    return loan


def ranks_by_proc(engine: TensorEngine) -> dict[str, int]:
    """Return the rank of each process of an engine's world, by process id."""
    return {ref.id: rank for rank, ref in enumerate(engine.world._target().procs)}


def ranks_in(engine: TensorEngine, procs: Sequence[Any]) -> tuple[int, ...]:
    """Return the ranks of processes in the engine's world; -1 for processes outside of it."""
    places = ranks_by_proc(engine)
    return tuple(places.get(ref.id, -1) for ref in procs)


def region_of(labels: Sequence[str], sizes: Sequence[int], ranks: tuple[int, ...]) -> Region | None:
    """Return the region that selects these ranks in row-major order; None if their spacing is uneven."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, ranks[step] - ranks[0] if size > 1 else 1)
        step *= size
    region = Region(labels, sizes, strides, ranks[0])
    return region if list(region.ranks()) == list(ranks) else None
