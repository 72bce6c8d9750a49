"""Move tensors between ranks, with gradients: `reduce`, `to_mesh`, `slice_mesh` and `borrow`.

``loss.backward()`` differentiates the sum of the losses of all ranks of the loss's mesh: each rank begins with a
gradient of one. The gradient of a rank's value is therefore the sum of its contributions to the losses of all ranks.
Each move has one adjoint, which is also a move: an all-reduce for an all-reduce, a reduce-scatter for an all-gather,
the reverse copy for a copy. Adjoints consist of the functions in this module, so second derivatives also work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)
from torch.utils._pytree import tree_map

from monarch_kernel.runtime.tensor.controller import borrowing, frames, reducing
from monarch_kernel.runtime.tensor.controller.borrowing import Borrow
from monarch_kernel.runtime.tensor.controller.errors import BorrowError
from monarch_kernel.runtime.tensor.controller.handle import Tensor, ValueOwner, make_handle
from monarch_kernel.runtime.tensor.controller.spec import spec_of, spec_on
from monarch_kernel.runtime.tensor.rank import reductions
from monarch_kernel.runtime.tensor.wire import RankMoves

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
    from monarch_kernel.runtime.tensor.controller.stream import Stream
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


Move = Callable[[Tensor], Tensor]


def reduce(
    tensor: Tensor,
    dims: Sequence[str] | str | None,
    reduction: str,
    scatter: bool,
    target: TensorMesh | None,
    out: Tensor | None,
) -> Tensor:
    """Implement `Tensor.reduce`. `target` is a part of the tensor's mesh."""
    if out is not None:
        return _reduce_into(tensor, dims, reduction, scatter, target, out)
    issue = functools.partial(reducing.reduce, dims=dims, reduction=reduction, scatter=scatter, target=target, out=None)
    if not _differentiates(tensor):
        return issue(tensor)
    mesh = tensor._spec.mesh
    if reduction in ("min", "max") and not scatter:
        return _Extreme.apply(tensor, issue, dims, reduction, mesh)
    return _Moved.apply(tensor, issue, _adjoint_of_reduce(mesh, dims, reduction, scatter, target))


def slice_mesh(tensor: Tensor, coords: dict[str, int | slice]) -> Tensor:
    """Implement `Tensor.slice_mesh`."""
    if not _differentiates(tensor):
        return _slice_mesh(tensor, coords)
    return _Moved.apply(tensor, lambda t: _slice_mesh(t, coords), functools.partial(_spread, mesh=tensor._spec.mesh))


def to_mesh(tensor: Tensor, procs: ProcMesh, stream: Stream | None) -> Tensor:
    """Implement `Tensor.to_mesh`."""
    if not _differentiates(tensor):
        return _to_mesh(tensor, procs, stream)
    source = tensor._spec.mesh

    def back(gradient: Tensor) -> Tensor:
        copies = [label for label in gradient._spec.mesh.labels if label not in source.labels]
        if copies:
            total = reduce(gradient, copies, "sum", False, None, None)
            gradient = slice_mesh(total, dict.fromkeys(copies, 0))
        return to_mesh(gradient, source.procs, source.stream)

    return _Moved.apply(tensor, lambda t: _to_mesh(t, procs, stream), back)


def borrow(tensor: Tensor, target: TensorMesh, mutable: bool) -> tuple[Tensor, Borrow]:
    """Implement `Stream.borrow`."""
    if not _differentiates(tensor):
        return borrowing.lend(tensor, target, mutable)
    if mutable:
        raise BorrowError(
            "a tensor that requires grad cannot be borrowed to be written, as gradients do not follow such writes: "
            "borrow t.detach(), or borrow it under torch.no_grad()"
        )
    made: list[Borrow] = []

    def issue(t: Tensor) -> Tensor:
        lent, its_borrow = borrowing.lend(t, target, mutable)
        made.append(its_borrow)
        return lent

    handle = _Moved.apply(tensor, issue, functools.partial(_into_stream, mesh=tensor._spec.mesh))
    return handle, made[0]


def without_gradient(what: str, results: object, inputs: Sequence[Tensor]) -> object:
    """Make the results of an operation without a gradient: a backward pass that reaches one of them raises.

    Args:
        what: the operation, for the error message.
        results: nested lists, tuples and dicts with tensors.
        inputs: the tensors among the arguments.
    """
    needs = next((t for t in inputs if _differentiates(t)), None)
    if needs is None:
        return results
    refuse = _refuse(what)

    def mark(result: object) -> object:
        if type(result) is not Tensor or not (result.is_floating_point() or result.is_complex()):
            return result
        return _Moved.apply(needs, lambda _: result, refuse)

    return tree_map(mark, results)


def _differentiates(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


class _Moved(torch.autograd.Function):
    """A linear move and its adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, issue: Move, adjoint: Move) -> Tensor:  # type: ignore[override]
        ctx.adjoint = adjoint
        return issue(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> object:  # type: ignore[override]
        return ctx.adjoint(gradient), None, None


class _MovedInPlace(torch.autograd.Function):
    """A linear move whose result replaces the tensor, and its adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, issue: Move, adjoint: Move) -> Tensor:  # type: ignore[override]
        ctx.adjoint = adjoint
        ctx.mark_dirty(tensor)
        return issue(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> object:  # type: ignore[override]
        return ctx.adjoint(gradient), None, None


class _Extreme(torch.autograd.Function):
    """The minimum or maximum over ranks. Ranks that hold it share the gradient, as in ``torch.amax``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tensor: Tensor, issue: Move, dims: Any, kind: str, mesh: TensorMesh
    ) -> Tensor:
        ctx.save_for_backward(tensor)
        ctx.dims, ctx.kind, ctx.mesh = dims, kind, mesh
        return issue(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> object:  # type: ignore[override]
        (tensor,) = ctx.saved_tensors
        values = tensor.detach()
        found = values == reducing.reduce(values, ctx.dims, ctx.kind, False, None, None)
        holders = reducing.reduce(found.to(tensor.dtype), ctx.dims, "sum", False, None, None)
        total = reduce(_spread(gradient, ctx.mesh), ctx.dims, "sum", False, None, None)
        return total * found / holders, None, None, None, None


def _adjoint_of_reduce(
    mesh: TensorMesh, dims: Sequence[str] | str | None, kind: str, scatter: bool, target: TensorMesh | None
) -> Move:
    if kind not in ("stack", "sum", "avg"):
        return _refuse(f"reduce(reduction={kind!r}{', scatter=True' if scatter else ''})")
    names = reducing.dimensions(mesh, dims)
    count = len(reducing.groups_of(mesh, names)[0])

    def adjoint(gradient: Tensor) -> Tensor:
        if target is not None:
            gradient = _spread(gradient, mesh)
        if kind == "stack":
            return reduce(gradient, names, "stack" if scatter else "sum", True, None, None)
        if not scatter:
            return reduce(gradient, names, kind, False, None, None)
        rows = reduce(gradient, names, "stack", False, None, None)
        scaled: Any = rows / count if kind == "avg" else rows
        return scaled

    return adjoint


def _reduce_into(
    tensor: Tensor,
    dims: Sequence[str] | str | None,
    reduction: str,
    scatter: bool,
    target: TensorMesh | None,
    out: Tensor,
) -> Tensor:
    def issue(t: Tensor) -> Tensor:
        made = reducing.reduce(t, dims, reduction, scatter, target, out if out is not tensor else t)
        torch.autograd.graph.increment_version(made)  # a backward pass that has saved it must detect the change
        return made

    if not _differentiates(tensor) and not _differentiates(out):
        return issue(tensor)
    if out is not tensor:
        raise RuntimeError(
            "reduce(out=...): gradients do not pass to a given tensor, and one of the two requires grad: leave `out` "
            "away, or work under torch.no_grad()"
        )
    if tensor.is_leaf:
        raise RuntimeError(
            "reduce_() of a leaf tensor that requires grad: work under torch.no_grad() (of gradients, "
            "t.grad.reduce_(...)), or use reduce()"
        )
    if reduction in ("min", "max"):  # the adjoint needs the earlier values
        raise RuntimeError(
            f"reduce_(reduction={reduction!r}) of a tensor that requires grad: use reduce(), as gradients need its "
            "values"
        )
    return _MovedInPlace.apply(tensor, issue, _adjoint_of_reduce(tensor._spec.mesh, dims, reduction, scatter, None))


def _spread(gradient: Tensor, mesh: TensorMesh) -> Tensor:
    """Extend a value from a part of a mesh to all of it, with zeros elsewhere. This is the adjoint of `slice_mesh`."""
    part = gradient._spec.mesh
    if part is mesh:
        return gradient
    coords = (frozenset(part.ranks), tuple(gradient.shape), gradient.dtype)

    def issue(t: Tensor) -> Tensor:
        return mesh.call(reductions.spread, lambda g, *_: torch.empty_like(g), t, *coords, onto=mesh)

    if not _differentiates(gradient):
        return issue(gradient)
    return _Moved.apply(gradient, issue, lambda g: _onto_part(g, part))


def _onto_part(tensor: Tensor, part: TensorMesh) -> Tensor:
    """Restrict a value to a part of a mesh, which may have fewer dimensions. This reverses `_spread`."""
    if not _differentiates(tensor):
        return handle_on(part, tensor)
    mesh = tensor._spec.mesh
    return _Moved.apply(tensor, lambda t: handle_on(part, t), functools.partial(_spread, mesh=mesh))


def _into_stream(gradient: Tensor, mesh: TensorMesh) -> Tensor:
    """Copy a value to the stream of `mesh`."""
    there = gradient._spec.mesh

    def issue(t: Tensor) -> Tensor:
        copy: Any = t.clone()
        return into_stream(mesh, copy)

    if not _differentiates(gradient):
        return issue(gradient)
    return _Moved.apply(gradient, issue, functools.partial(_into_stream, mesh=there))


def _refuse(what: str) -> Move:
    """Return a function that raises, in place of an undefined adjoint.

    Its error names the line of the call, which a backward pass does not show.
    """
    file, line, _ = frames.here()

    def refuse(gradient: Tensor) -> Tensor:
        raise RuntimeError(
            f"{what} at {file}:{line} has no gradient, and a backward has come to it: detach() its input if none is "
            "meant, or give it one (monarch_kernel.tensor.grad_function)"
        )

    return refuse


def _slice_mesh(tensor: Tensor, coords: dict[str, int | slice]) -> Tensor:
    """Implement `Tensor.slice_mesh`."""
    mesh = tensor._spec.mesh
    if mesh.sharded:
        raise TypeError(
            f"slice_mesh() of a tensor in parts of mesh {mesh.name}: a part of the ranks has not all of it. "
            "t.to_local(...) gives one rank's part; redistribute() another layout"
        )
    procs = mesh.procs.slice(**coords)
    return handle_on(mesh.engine.mesh_of(procs, mesh.stream), tensor)


def _to_mesh(tensor: Tensor, procs: ProcMesh, stream: Stream | None) -> Tensor:
    """Implement `Tensor.to_mesh`."""
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
    """Return a value that has no other user in another stream. Operations there wait until it has been computed."""
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
    return carrier.call(reductions.transferred, lambda t, _: t.new_empty(shape), tensor, how, onto=target)


def senders(source: TensorMesh, target: TensorMesh) -> list[int]:
    """Return, for each rank of `target`, the rank of `source` that sends its value.

    Raises:
        ValueError: the meshes have different sizes, or `target` lacks a dimension.
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
    """Move a value to other processes over the data plane.

    The controller waits, because the two worlds have no common order of operations.
    """
    source = tensor._spec.mesh
    route = senders(source, target)
    source.engine.plan.synchronised("to_mesh()")
    offers = dict(source.engine.ask(source, reductions.offered, tensor))
    engine = target.engine
    try:
        number = engine.new_number()
        plan = {target.ranks[k]: offers[source.ranks[sender]] for k, sender in enumerate(route)}
        take = functools.partial(reductions.taken, number, plan, tuple(tensor.shape), tensor.dtype)
        engine.ask(target, take)
    finally:
        source.engine.ask(source, reductions.withdraw)
    with _disable_current_modes():
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return make_handle(spec_of(target, like), ValueOwner(number, target.dead))


def handle_on(mesh: TensorMesh, tensor: Tensor) -> Tensor:
    """Create another handle of a value, on a part of its ranks or in another stream."""
    made = make_handle(spec_on(mesh, tensor._spec), tensor._owner)
    made._constant = tensor._constant
    return made
