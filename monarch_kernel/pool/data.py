"""Split sequences and arrays into one piece per rank, and join the pieces again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

from monarch_kernel.actor import ProcMesh, ValueMesh
from monarch_kernel.pool.pool import pool_of


def scatter(procs: ProcMesh, name: str, values: Any) -> ValueMesh[int]:
    """See `ProcMesh.scatter`."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"scatter(name, values): {name!r} cannot name a variable")
    try:
        total = len(values)
        values[0:0]
    except (TypeError, KeyError):
        kind = type(values).__name__
        raise TypeError(
            f"a {kind} cannot be cut into pieces: give a list, a tuple, a string, an array or a tensor"
        ) from None
    workers = pool_of(procs)._workers
    calls = [worker.put.call_one(name, values[part]) for worker, part in zip(workers, parts(total, len(workers)))]
    return ValueMesh(procs.extent, [call.get() for call in calls])


def gather(procs: ProcMesh, name: str) -> Any:
    """See `ProcMesh.gather`."""
    values = list(pool_of(procs)._whole.take.call(name).get().values())
    try:
        return concatenated(values)
    except TypeError as error:
        raise TypeError(f"gather({name!r}): {error}") from None


def parts(total: int, count: int) -> list[slice]:
    """Return `count` slices of `total` elements, as equal as possible, the longer slices first."""
    size, longer = divmod(total, count)
    ends = [size * k + min(k, longer) for k in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def concatenated(values: Sequence[Any]) -> Any:
    """Join pieces of one type."""
    kinds = {type(value) for value in values}
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    first = values[0]
    if torch is not None and all(isinstance(value, torch.Tensor) for value in values):
        return torch.cat([value.cpu() for value in values])
    if numpy is not None and all(isinstance(value, numpy.ndarray) for value in values):
        return numpy.concatenate(values)
    if kinds == {list}:
        return list(chain.from_iterable(values))
    if kinds == {tuple}:
        return tuple(chain.from_iterable(values))
    if kinds == {str} or kinds == {bytes}:
        return type(first)().join(values)
    if kinds == {range}:
        return list(chain.from_iterable(values))
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise TypeError(f"values of type {names} cannot be joined; %mesh pull gives them as a ValueMesh")
