"""Share DTensors and device meshes with the program's own code on a rank: its actors and cells.

That code runs concurrently with the stream of operations. It therefore gets separate device meshes over separate
process groups, so that its collectives and those of the stream never mix. Only memory is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, debug
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from monarch_kernel.runtime.actor.context import current_rank
from monarch_kernel.runtime.actor.definition import Actor, endpoint
from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.rank.offers import taken
from monarch_kernel.runtime.tensor.rank.values import awaited_store, store_of
from monarch_kernel.runtime.tensor.sharded.rank import views
from monarch_kernel.runtime.tensor.sharded.rank.layout import dtensor_of
from monarch_kernel.runtime.tensor.sharded.rank.rules import rules_of
from monarch_kernel.runtime.tensor.sharded.rank.state import rules
from monarch_kernel.runtime.tensor.wire import FailedValue

# After a process group was formed again, bind values to it or make them failures on every rank; report failures.
#
# `StreamPosition` reports the position of a rank's stream, even while the stream is stuck in a collective.

Failures = dict[int, FailedValue]


def rebind() -> Failures:
    """Bind the values of this rank to the new device meshes. Return the failures among them."""
    state, worker = rules(), here()
    key_of = {id(mesh): key for key, mesh in state.former.items()}
    values = worker.store.values
    for value in [*values.values(), *views.sources()]:
        if isinstance(value, DTensor):
            mesh = state.meshes.get(key_of.get(id(value.device_mesh)))
            if mesh is not None:
                spec = value._spec
                value._spec = DTensorSpec(mesh, spec.placements, tensor_meta=spec.tensor_meta)
    state.former.clear()
    debug._clear_sharding_prop_cache()  # its entries refer to the old meshes
    worker.unseen = None
    return {number: value for number, value in values.items() if isinstance(value, FailedValue)}


def fail(failures: Failures) -> None:
    """Make these values failures on this rank too.

    Operations that depend on them then fail on all ranks, and none waits.
    """
    here().store.values.update(failures)


def lose(kept: Iterable[int], text: str) -> None:
    """Make sharded values failures if a part was on a process that died, except for restored values."""
    worker, keep = here(), set(kept)
    values = worker.store.values
    for number, value in values.items():
        if number not in keep and isinstance(value, DTensor):
            values[number] = FailedValue(-1, worker.rank, text, lost=True)


def report_to(port: Any, group: int) -> None:
    """Report operations that fail first on this rank to the controller.

    Args:
        port: receives ``(group, failure, ranks)``, with the ranks of the meshes of the operation's inputs.
        group: the number of the process group.
    """

    def report(failed: FailedValue, inputs: Sequence[object]) -> None:
        ranks = {r for x in inputs if isinstance(x, DTensor) for r in x.device_mesh.mesh.flatten().tolist()}
        port.send((group, failed, sorted(ranks)))

    here().store.report = report


def generator() -> object:
    """Return the random states."""
    return rules().generator.get()


def set_generator(states: Any) -> None:
    """Set the random states of another rank."""
    rules().generator.restore(states)


class StreamPosition(Actor):
    """Runs in each rank beside the executors of an engine."""

    __tool__ = True

    def __init__(self, engine: str) -> None:
        self._store = store_of(engine, current_rank().rank)

    @endpoint
    def at(self) -> int:
        """Return the number of the record in the main stream that runs now or ran last."""
        return self._store.at()


def share_mesh(key: object, ranks: Sequence[int], sizes: Sequence[int], labels: Sequence[str]) -> None:
    """Create the device mesh of a program. All ranks of the world call this, including ranks outside of the mesh.

    After a process group was formed again, the meshes of programs use the new group.
    """
    grid = torch.tensor(list(ranks)).view(*sizes)
    made = DeviceMesh(current_executor.of_rank().type, grid, mesh_dim_names=tuple(labels))
    known = rules().shared.setdefault(key, made)
    known._dim_group_names, known._pg_registry = made._dim_group_names, made._pg_registry


def device_mesh_here(engine: str, key: object) -> DeviceMesh:
    """Return the device mesh for programs, which a `Mesh` becomes as an argument of an endpoint."""
    return rules_of(awaited_store(engine).extras).shared[key]


def adopted(
    number: int,
    offers: dict[int, int],
    key: object,
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
