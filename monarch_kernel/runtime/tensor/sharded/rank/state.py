"""A rank's state for sharded meshes (device meshes, rules, counters), with functions that the controller calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.sharded.rank.counts import count_redistributions, counts
from monarch_kernel.runtime.tensor.sharded.rank.rules import OperationRules, rules_of

#: Loggers of torch that describe data movements at length on every rank.
_TALKATIVE = (
    "torch.distributed.tensor._collective_utils",
    "torch.distributed.tensor._redistribute",
    "torch.distributed._functional_collectives",
    "torch._logging",
)

#: Distinguishes device meshes of the stream from equal ones of the program. DTensor caches results of its rules by
#: mesh, and would otherwise use the process groups of one for tensors of the other.
_OURS = -1


def rules() -> OperationRules:
    """Return the rules of the engine whose executor runs here."""
    return rules_of(here().store.extras)


def begin(notes: Any) -> None:
    """Initialise the state for a new process group of all ranks of the world. Previous device meshes are dropped.

    Args:
        notes: a port to the controller, for names of operations that ran on whole tensors.
    """
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    found = rules()
    found.former, found.meshes = {**found.former, **found.meshes}, {}
    found.strict.clear()
    found.forget_layouts()
    told: set[str] = set()

    def tell(name: str, definition: int, record: int) -> None:
        if name not in told:
            told.add(name)
            notes.send((name, record))

    counts.tell = tell if here().rank == 0 else None  # one rank reports, because all do the same


def make_mesh(key: object, ranks: Sequence[int], sizes: Sequence[int], labels: Sequence[str], strict: bool) -> None:
    """Create a device mesh of some ranks of the world.

    All ranks of the world call this, including ranks outside of the mesh.
    """
    of_rank = current_executor.of_rank()
    if of_rank.type == "cuda":
        torch.cuda.set_device(of_rank)
    count_redistributions()
    worker = here()
    counts.record = lambda: worker.at
    grid = torch.tensor(list(ranks)).view(*sizes)
    # separate groups, because a program's collectives in the default group may run concurrently
    backend = dist.get_backend_config()
    mesh = DeviceMesh(
        of_rank.type, grid, mesh_dim_names=tuple(labels), backend_override=((backend, None),) * len(sizes)
    )
    mesh._thread_id = _OURS
    rules().meshes[key] = mesh
    be_strict(key, strict)


def be_strict(key: object, strict: bool) -> None:
    """Set whether operations without a rule for a layout are refused on a mesh."""
    found = rules()
    meshes = found.strict
    (meshes.add if strict else meshes.discard)(found.meshes[key])


def redistributed(x: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Return `x` in another layout."""
    if x.placements != tuple(placements):
        counts.moved(x.placements, placements, x.numel() * x.element_size())
    made: Any = x.redistribute(placements=placements)
    return made if made is not x else made.clone()


def layouts(*values: Any) -> list[tuple[Placement, ...]]:
    """Return the placements of values."""
    return [x.placements for x in values]


def local_part(x: DTensor) -> torch.Tensor:
    """Return this rank's part of a value."""
    return x.to_local().detach()


def take_counts() -> object:
    """Return the costs of sharded operations since the last call, by record."""
    return counts.take()


def set_generator(state: torch.Tensor | int, keep: int) -> None:
    """Set the state of random operations. The current state is kept under a number."""
    rules().generator.keep(keep)
    rules().generator.set(state)


def rewind_generator(number: int, keep: int) -> None:
    """Restore the state of random operations at the record of this number, or the state kept under this number."""
    rules().generator.keep(keep)
    rules().generator.rewind(number)
