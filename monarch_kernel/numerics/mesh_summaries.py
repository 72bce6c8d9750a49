"""Summarize tensors that are on the ranks of a mesh, for a recording in the process that controls them.

With `mesh.activate()` or `distribute`, a program computes with handles, and the values are on the ranks. The hooks of a
recording see the handles. `MeshSummaries.request` has every rank summarize its part of a value, in order with the
program's operations and without waiting for it, so the value may change afterwards. `fetch` returns the summaries of
all ranks, in one round trip for each mesh and stream.

The functions below `# -- on ranks` run in the ranks.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from monarch_kernel.actor import context
from monarch_kernel.numerics.summaries import (
    Placement,
    Split,
    Summary,
    generator_summaries,
    local_of,
    perturbed,
    placement_of,
    summarize,
)

if TYPE_CHECKING:
    from monarch_kernel.tensor import Tensor

#: What to do instead, for messages of tools that work on the tensors of one process.
ON_RANKS = "run the training on the ranks themselves, in %%mesh cells, actors or a script"


def is_on_mesh(tensor: object) -> bool:
    """Return whether a tensor is a handle of values on a mesh. Does not load the engine of such tensors."""
    kind = type(tensor)
    return kind is not torch.Tensor and hasattr(kind, "slice_mesh")


def mesh_name(tensor: torch.Tensor) -> str:
    """Return the name of the mesh that a handle's values are on."""
    return str(cast("Tensor", tensor).mesh.name)


class RankPart(NamedTuple):
    """What a rank has found of a value.

    Attributes:
        name: which of several summaries of one request it is; "" if there is only one.
        summary: of the rank's part.
        placement: the part that the rank has; None if it is not known.
        kept: the part itself, if it was requested.
    """

    name: str
    summary: Summary
    placement: Placement | None
    kept: torch.Tensor | None


@dataclass(slots=True)
class RankSummaries:
    """What a rank has found since the last fetch.

    Attributes:
        host: the name of its host.
        pid: its process.
        found: its summaries, by number of the request.
    """

    host: str
    pid: int
    found: dict[int, list[RankPart]] = field(default_factory=dict[int, list[RankPart]])


class MeshSummaries:
    """Requests of one recording. Not for several threads at once."""

    def __init__(self) -> None:
        from monarch_kernel.tensor import remote

        self._key = uuid.uuid4().hex
        self._latest: dict[tuple[int, int], Tensor] = {}  # by mesh and stream
        self._ranks: dict[tuple[str, int], int] = {}  # by host and process
        self._summarize = remote(summarize_here, propagate="inspect")
        self._generators = remote(summarize_generators_here, propagate="inspect")
        self._take = remote(take_here)
        self._factor = remote(factor_here, propagate=lambda value, units: torch.empty_like(value))

    @property
    def world_size(self) -> int:
        """The number of ranks that have answered so far, or a higher one if ranks in between have not."""
        return 1 + max(self._ranks.values(), default=0)

    def request(self, number: int, tensor: torch.Tensor, split: Split | None, keeps: bool) -> None:
        """Have the ranks summarize a value, as it is after the operations so far.

        Args:
            number: by which its summaries are found.
            split: how plain tensors are parts of one; DTensors know that.
            keeps: whether to return the tensor, too.
        """
        self._summarize.broadcast(self._noted(tensor), float(number), self._key, split, keeps)

    def request_generators(self, number: int, tensor: torch.Tensor, keeps: bool) -> None:
        """Have the ranks of a tensor's mesh summarize the states of their random generators."""
        self._generators.broadcast(self._noted(tensor), float(number), self._key, keeps)

    def perturbed(self, tensor: torch.Tensor, units: int) -> torch.Tensor:
        """Return a value with each element moved by units in the last place, as `summaries.perturbed` does."""
        return tensor * self._factor(tensor.detach(), units)

    def fetch(self) -> dict[int, RankSummaries]:
        """Wait for the ranks, and return what they have found since the last call, by rank.

        Ranks have their numbers in the world of their mesh. Those of a second world follow.

        Raises:
            RuntimeError: a rank has died, or could not summarize a value.
        """
        answers: list[Any] = [self._take.call(tensor, self._key) for tensor in self._latest.values()]
        self._latest.clear()
        found: dict[int, RankSummaries] = {}
        for answer in answers:
            for host, pid, rank, summaries in answer.get().values():
                number = self._ranks.setdefault((host, pid), self._free_number(rank))
                of_rank = found.setdefault(number, RankSummaries(host, pid))
                for request, name, summary, placement, kept in summaries:
                    if isinstance(summary, str):
                        raise RuntimeError(f"rank {number} could not summarize a tensor: {summary}")
                    place = None if placement is None else Placement.from_dict(placement)
                    of_rank.found.setdefault(request, []).append(RankPart(name, Summary(*summary), place, kept))
        return found

    def _free_number(self, rank: int) -> int:
        taken = set(self._ranks.values())
        return rank if rank not in taken else max(taken) + 1

    def _noted(self, tensor: torch.Tensor) -> Tensor:
        """Return a handle without its graph, and remember its mesh."""
        handle = cast("Tensor", tensor.detach())
        self._latest[id(handle.mesh), id(handle.stream)] = handle
        return handle


# -- on ranks ----------------------------------------------------------------------------------------

_Found = tuple[int, str, tuple[Any, ...] | str, dict[str, Any] | None, torch.Tensor | None]
"""Number of the request, name, summary or the reason why there is none, placement and tensor, as plain data."""

_found: dict[str, list[_Found]] = {}
_lock = threading.Lock()  # each stream has a thread


def summarize_here(value: torch.Tensor, number: float, key: str, split: Split | None, keeps: bool) -> None:
    """Summarize this rank's part of a value. An error is kept for `take_here`: here, it would be the program's."""
    found: _Found
    try:
        placement = placement_of(value)
        if placement is None and split is not None:
            placement = split.place(value.shape, *rank_on_mesh())
        summary = summarize(value, placement)
        kept = local_of(value).to("cpu", copy=True).contiguous() if keeps else None
        found = (int(number), "", astuple(summary), None if placement is None else placement.to_dict(), kept)
    except Exception as error:
        found = (int(number), "", f"{type(error).__name__}: {error}", None, None)
    with _lock:
        _found.setdefault(key, []).append(found)


def summarize_generators_here(value: torch.Tensor, number: float, key: str, keeps: bool) -> None:
    """Summarize the states of this rank's random generators."""
    for name, tensor, summary in generator_summaries():
        with _lock:
            _found.setdefault(key, []).append((int(number), name, astuple(summary), None, tensor if keeps else None))


def take_here(value: torch.Tensor, key: str) -> tuple[str, int, int, Sequence[_Found]]:
    """Return host, process and rank of this process, and what it has found since the last call."""
    with _lock:
        found = _found.pop(key, [])
    return socket.gethostname(), os.getpid(), rank_on_mesh()[0], found


def factor_here(value: torch.Tensor, units: int) -> torch.Tensor:
    """Return the factors that move each element of a value by units in the last place, in fixed random directions."""
    factor = torch.ones_like(value)
    local = local_of(factor)
    local.copy_(perturbed(local, units))
    return factor


def rank_on_mesh() -> tuple[int, int]:
    """Return this rank of the mesh, and the size of the mesh."""
    point = context().actor_instance.rank
    return point.rank, point.extent.nelements
