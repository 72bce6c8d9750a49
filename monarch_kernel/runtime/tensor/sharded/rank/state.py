"""What a rank keeps for sharded meshes: device meshes, rules, counters. Functions that the controller calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from monarch_kernel.runtime.tensor.rank import device
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.sharded.rank.counts import count_redistributions, counts
from monarch_kernel.runtime.tensor.sharded.rank.rules import OperationRules, rules_of

#: Loggers of torch that tell every rank at length how it moves data.
_TALKATIVE = (
    "torch.distributed.tensor._collective_utils",
    "torch.distributed.tensor._redistribute",
    "torch.distributed._functional_collectives",
    "torch._logging",
)

#: What makes device meshes of the stream differ from equal ones of the program. DTensor remembers results of its rules
#: by mesh, and would use the process groups of the one for tensors of the other.
_OURS = -1


def rules() -> OperationRules:
    """Those of the engine whose worker runs here."""
    return rules_of(here().store.extras)


def begin(notes: Any) -> None:
    """The process group of all ranks of the world is there, or a new one; device meshes of before are gone.

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

    counts.tell = tell if here().rank == 0 else None  # one rank tells: all do the same


def make_mesh(key: Any, ranks: Sequence[int], sizes: Sequence[int], labels: Sequence[str], strict: bool) -> None:
    """Make a device mesh of some ranks of the world; all ranks of the world call it, those outside it, too."""
    of_rank = device.of_rank()
    if of_rank.type == "cuda":
        torch.cuda.set_device(of_rank)
    count_redistributions()
    worker = here()
    counts.record = lambda: worker.at
    grid = torch.tensor(list(ranks)).view(*sizes)
    # groups of its own: a program's collectives in the default group may run at the same time
    backend = dist.get_backend_config()
    mesh = DeviceMesh(
        of_rank.type, grid, mesh_dim_names=tuple(labels), backend_override=((backend, None),) * len(sizes)
    )
    mesh._thread_id = _OURS
    rules().meshes[key] = mesh
    be_strict(key, strict)


def be_strict(key: Any, strict: bool) -> None:
    """Whether operations that have no rule for a layout on a mesh are refused."""
    found = rules()
    meshes = found.strict
    (meshes.add if strict else meshes.discard)(found.meshes[key])


def redistributed(x: DTensor, placements: Sequence[Placement]) -> DTensor:
    """`x` in another layout."""
    if x.placements != tuple(placements):
        counts.moved(x.placements, placements, x.numel() * x.element_size())
    made: Any = x.redistribute(placements=placements)
    return made if made is not x else made.clone()


def layouts(*values: Any) -> list[tuple[Placement, ...]]:
    """The placements of values."""
    return [x.placements for x in values]


def local_part(x: DTensor) -> torch.Tensor:
    """This rank's part of a value."""
    return x.to_local().detach()


def take_counts() -> Any:
    """What sharded operations have cost since the last call, by record."""
    return counts.take()


def set_generator(state: torch.Tensor | int, keep: int) -> None:
    """Random operations go on from here; the state until now is kept under a number."""
    rules().generator.keep(keep)
    rules().generator.set(state)


def rewind_generator(number: int, keep: int) -> None:
    """Random operations go on as they did at the record of this number, or from the state that was kept under it."""
    rules().generator.keep(keep)
    rules().generator.rewind(number)
