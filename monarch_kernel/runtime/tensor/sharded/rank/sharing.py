"""Share DTensors and device meshes with the program's own code on a rank: its actors and cells.

That code runs concurrently with the stream of operations. It therefore gets separate device meshes over separate
process groups, so that its collectives and those of the stream never mix. Only memory is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Placement

from monarch_kernel.runtime.tensor.rank import device
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.rank.offers import taken
from monarch_kernel.runtime.tensor.rank.values import awaited_store
from monarch_kernel.runtime.tensor.sharded.rank.layout import dtensor_of
from monarch_kernel.runtime.tensor.sharded.rank.rules import rules_of
from monarch_kernel.runtime.tensor.sharded.rank.state import rules


def share_mesh(key: Any, ranks: Sequence[int], sizes: Sequence[int], labels: Sequence[str]) -> None:
    """Create the device mesh of a program. All ranks of the world call this, including ranks outside of the mesh.

    After a process group was formed again, the meshes of programs use the new group.
    """
    grid = torch.tensor(list(ranks)).view(*sizes)
    made: Any = DeviceMesh(device.of_rank().type, grid, mesh_dim_names=tuple(labels))
    known = rules().shared.setdefault(key, made)
    known._dim_group_names, known._pg_registry = made._dim_group_names, made._pg_registry


def device_mesh_here(engine: str, key: Any) -> DeviceMesh:
    """Return the device mesh for programs, which a `Mesh` becomes as an argument of an endpoint."""
    return rules_of(awaited_store(engine).extras).shared[key]


def adopted(
    number: int,
    offers: dict[int, int],
    key: Any,
    placements: Sequence[Placement],
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> None:
    """Store this rank's offer as a value: its part of a tensor of this size.

    Args:
        number: the number of the value.
        offers: the numbers of the offers, by rank.
        key: the key of its mesh.
    """
    worker = here()
    local = taken(offers[worker.rank])
    local = getattr(local, "_local_tensor", local)
    local = getattr(local, "elem", local.wait()) if hasattr(local, "trigger_wait") else local
    meta = TensorMeta(torch.Size(size), stride, local.dtype)
    worker.store.values[number] = dtensor_of(local, rules().meshes[key], placements, meta)
