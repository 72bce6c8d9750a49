"""``to_mesh`` and ``slice_mesh``: tensors on other ranks, and on a part of their ranks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.tensor.controller.handle import Tensor, ValueOwner, make_handle
from monarch_kernel.runtime.tensor.controller.spec import spec_of, spec_on
from monarch_kernel.runtime.tensor.rank import transfers
from monarch_kernel.runtime.tensor.wire.moves import RankMoves

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
    from monarch_kernel.runtime.tensor.controller.stream import Stream
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


def slice_mesh(tensor: Tensor, coords: dict[str, int | slice]) -> Tensor:
    """See `Tensor.slice_mesh`."""
    mesh = tensor._spec.mesh
    if mesh.sharded:
        raise TypeError(
            f"slice_mesh() of a tensor in parts of mesh {mesh.name}: a part of the ranks has not all of it. "
            "t.to_local(...) gives one rank's part; redistribute() another layout"
        )
    procs = mesh.procs.slice(**coords)
    return handle_on(mesh.engine.mesh_of(procs, mesh.stream), tensor)


def to_mesh(tensor: Tensor, procs: ProcMesh, stream: Stream | None) -> Tensor:
    """See `Tensor.to_mesh`."""
    source = tensor._spec.mesh
    if source.sharded:
        raise TypeError(f"to_mesh() of a sharded tensor of mesh {source.name}: only plain ones move so")
    stream = source.stream if stream is None else stream
    engine = source.engine.of(procs)
    if engine is not source.engine:
        return _to_other_world(tensor, engine.mesh_of(procs, stream))
    target = engine.mesh_of(procs, source.stream)
    moved = _moved(tensor, source, target)
    if stream is not source.stream:
        moved = into_stream(engine.mesh_of(procs, stream), moved)
    return moved


def into_stream(target: TensorMesh, tensor: Tensor) -> Tensor:
    """A value that nothing else uses, in another stream: operations there wait until it has been made."""
    target.engine.order(tensor._spec.mesh, target)
    made = handle_on(target, tensor)
    made._owner.delete_in(target.dead)
    return made


def _moved(tensor: Tensor, source: TensorMesh, target: TensorMesh) -> Tensor:
    engine = source.engine
    pairs = tuple((source.ranks[sender], target.ranks[k]) for k, sender in enumerate(senders(source, target)))
    ranks = tuple(sorted({rank for pair in pairs for rank in pair}))
    how = RankMoves(source.stream.number, ranks, pairs, tuple(tensor.shape), tensor.dtype)
    if any(sender != receiver for sender, receiver in pairs):
        engine.groups.need(source.stream, (ranks,))
        engine.plan.line().moved += tensor.numel() * tensor.element_size()
    carrier = engine.mesh_of(engine.world, source.stream)
    shape = tuple(tensor.shape)
    return carrier.call(transfers.transferred, lambda t, _: t.new_empty(shape), tensor, how, onto=target)


def senders(source: TensorMesh, target: TensorMesh) -> list[int]:
    """For each rank of `target` the rank of `source` that it gets its value from.

    Raises:
        ValueError: they have different sizes, or `target` lacks a dimension.
    """
    sizes = dict(zip(target.labels, target.sizes))
    for label, size in zip(source.labels, source.sizes):
        if sizes.get(label) != size:
            what = f"it has {label}={sizes[label]}" if label in sizes else f"it has no dimension {label!r}"
            raise ValueError(
                f"to_mesh: a tensor of mesh {source.name} with {label}={size} cannot be on mesh {target.name}: {what}. "
                "Take a part of it (slice_mesh), or rename dimensions of the mesh (mesh.rename)"
            )
    found: list[int] = []
    for k in range(len(target.ranks)):
        at: dict[str, int] = {}
        for label, size in zip(reversed(target.labels), reversed(target.sizes)):
            k, at[label] = divmod(k, size)
        rank = 0
        for label, size in zip(source.labels, source.sizes):
            rank = rank * size + at[label]
        found.append(rank)
    return found


def _to_other_world(tensor: Tensor, target: TensorMesh) -> Tensor:
    """Over the data plane. The controller waits: the two worlds have no order of operations in common."""
    source = tensor._spec.mesh
    route = senders(source, target)
    source.engine.plan.synchronised("to_mesh()")
    offers = dict(source.engine.ask(source, transfers.offered, tensor))
    engine = target.engine
    try:
        number = engine.new_number()
        plan = {target.ranks[k]: offers[source.ranks[sender]] for k, sender in enumerate(route)}
        take = functools.partial(transfers.taken, number, plan, tuple(tensor.shape), tensor.dtype)
        engine.ask(target, take)
    finally:
        source.engine.ask(source, transfers.withdraw)
    with _disable_current_modes():
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return make_handle(spec_of(target, like), ValueOwner(number, target.dead))


def handle_on(mesh: TensorMesh, tensor: Tensor) -> Tensor:
    """Another handle of a value, on a part of its ranks or in another stream."""
    made = make_handle(spec_on(mesh, tensor._spec), tensor._owner)
    made._constant = tensor._constant
    return made
