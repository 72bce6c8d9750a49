"""Implement ``Tensor.reduce``: find the groups of ranks for dimensions of a mesh, and the shapes of the results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from monarch_kernel.runtime.mesh.shape import unknown_dimension
from monarch_kernel.runtime.tensor.controller.errors import MixedTensorsError
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.rank import reductions
from monarch_kernel.runtime.tensor.wire import REDUCTIONS, Reduction

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh

_BITWISE = frozenset({"band", "bor", "bxor"})


def reduce(
    tensor: Tensor,
    dims: Sequence[str] | str | None,
    reduction: str,
    scatter: bool,
    target: TensorMesh | None,
    out: Tensor | None,
) -> Tensor:
    """Implement `Tensor.reduce`. `target` is a part of the tensor's mesh."""
    mesh = tensor._spec.mesh
    if mesh.sharded:
        raise TypeError(f"reduce() of a sharded tensor of mesh {mesh.name}: redistribute() it, or reduce its elements")
    names = dimensions(mesh, dims)
    partition = groups_of(mesh, names)
    count = len(partition[0])
    _check(tensor, reduction, scatter, count)
    roots = None
    if target is not None and target is not mesh:
        roots = frozenset(target.ranks)
        if out is not None:
            raise ValueError("reduce(mesh=..., out=...): a result on another mesh is a new tensor: leave `out` away")
    how = Reduction(mesh.stream.number, partition, reduction, scatter, roots)
    mesh.check_alive()
    mesh.engine.groups.need(mesh.stream, partition)
    mesh.engine.plan.line().moved += tensor.numel() * tensor.element_size()
    shape = _shape(tensor, reduction, scatter, count)
    if out is None:
        return mesh.call(reductions.reduced, lambda t, _: t.new_empty(shape), tensor, how, meets=True, onto=target)
    if out._spec.mesh is not mesh:
        raise MixedTensorsError(f"reduce(out=...): out is on {out._spec.mesh!r}, and the tensor on {mesh!r}")
    if tuple(out.shape) != shape or out.dtype != tensor.dtype:
        raise ValueError(
            f"reduce(out=...): out has shape {list(out.shape)} and {out.dtype}, and the result {list(shape)} and "
            f"{tensor.dtype}"
        )
    mesh.call(reductions.reduce_into, lambda o, t, _: _written(o), out, tensor, how, meets=True)
    return out


def _written(out: torch.Tensor) -> None:
    out.zero_()


def dimensions(mesh: TensorMesh, dims: Sequence[str] | str | None) -> tuple[str, ...]:
    """Return the names of dimensions of a mesh; all of them for None.

    Raises:
        KeyError: there is no such dimension.
        ValueError: a dimension is named twice.
    """
    names = mesh.labels if dims is None else (dims,) if isinstance(dims, str) else tuple(dims)
    for name in names:
        if name not in mesh.labels:
            raise unknown_dimension(name, mesh.labels)
    if len(set(names)) != len(names):
        raise ValueError(f"dimensions {names}: each may be named once")
    return names


def groups_of(mesh: TensorMesh, names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Group the ranks of the world that differ only in these dimensions, in the order of the names."""
    strides = dict(zip(mesh.labels, _strides(mesh.sizes)))
    sizes = dict(zip(mesh.labels, mesh.sizes))

    def offsets(labels: Sequence[str]) -> list[int]:
        ways = itertools.product(*(range(0, sizes[label] * strides[label], strides[label]) for label in labels))
        return [sum(way) for way in ways]

    inner = offsets(names)
    others = offsets([label for label in mesh.labels if label not in names])
    return tuple(tuple(mesh.ranks[first + step] for step in inner) for first in others)


def _strides(sizes: tuple[int, ...]) -> list[int]:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return strides if sizes else []


def _check(tensor: Tensor, reduction: str, scatter: bool, count: int) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r}: there are {', '.join(REDUCTIONS)}")
    dtype = tensor.dtype
    wrong = (
        (reduction in _BITWISE and (dtype.is_floating_point or dtype.is_complex))
        or (reduction == "avg" and not (dtype.is_floating_point or dtype.is_complex))
        or (reduction in ("min", "max") and dtype.is_complex)
        or (reduction == "sum" and dtype == torch.bool)
    )
    if wrong:
        raise TypeError(f"reduce(reduction={reduction!r}) cannot be of {dtype}: convert it first (t.to(dtype))")
    if scatter and (tensor.dim() == 0 or tensor.size(0) != count):
        raise TypeError(
            f"reduce(scatter=True): dimension 0 of a tensor of shape {list(tensor.shape)} must have the size {count}, "
            "one part for each rank that takes part"
        )


def _shape(tensor: Tensor, reduction: str, scatter: bool, count: int) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if reduction == "stack":
        return shape if scatter else (count, *shape)
    return shape[1:] if scatter else shape
