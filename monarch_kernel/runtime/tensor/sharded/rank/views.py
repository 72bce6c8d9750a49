"""Views that are copies: of a sharded tensor, a row along the sharded dimension has to be fetched from another rank.

In torch, writing a view writes its source, and the other way round. Where the layout made a view a copy, it is
*detached*:
this module remembers where it came from, and brings both sides together after an operation that writes one of them.
All ranks decide alike, since a view is detached by what its layout is and never by what memory a rank has.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_kernel.runtime.tensor.sharded.rank.layout import whole_of, write


class Detached:
    """Where a detached view came from: ``operation(source, *args, **kwargs)[index]``."""

    __slots__ = ("args", "index", "kwargs", "operation", "source")

    def __init__(self, source: DTensor, operation: Any, args: Any, kwargs: Any, index: int | None) -> None:
        self.source = source
        self.operation = operation
        self.args = args
        self.kwargs = kwargs
        self.index = index

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view, of the whole source."""
        out = self.operation(whole, *self.args, **self.kwargs)
        return out if self.index is None else out[self.index]


#: The source of each detached view, and views by the memory of their source and by their own.
_origin: weakref.WeakKeyDictionary[Any, Detached] = weakref.WeakKeyDictionary()
_views: dict[int, list[weakref.ref[Any]]] = {}
#: Groups of views are looked through for dead ones when there are so many.
MANY = 1024


class _Key:
    """Stands for a DTensor in tables: its own ``==`` compares values."""

    __slots__ = ("__weakref__",)


def detach(view: Any, operation: Any, source: DTensor, args: Any, kwargs: Any) -> None:
    """Remember that these results of a view operation are copies of parts of `source`."""
    if len(_views) > MANY:
        for memory in [m for m, group in _views.items() if not any(ref() is not None for ref in group)]:
            del _views[memory]
    single = isinstance(view, DTensor)
    each: list[Any] = [view] if single else view
    for index, one in enumerate(each):
        key = one._mk_key = _Key()
        _origin[key] = Detached(source, operation, args, kwargs, None if single else index)
        for memory in {_memory(source), _memory(one)}:
            _views.setdefault(memory, []).append(weakref.ref(one))


def keep_source(view: Any, source: DTensor) -> None:
    """A view that shares memory with `source`, which may be a detached view and must live as long."""
    if _origin:
        each: list[Any] = [view] if isinstance(view, DTensor) else view
        for one in each:
            one._mk_source = source


def sources() -> list[DTensor]:
    """What detached views came from."""
    return [detached.source for detached in _origin.values()]


def any_detached() -> bool:
    """Whether a write has to look for views at all."""
    return bool(_origin)


def written(x: DTensor) -> None:
    """`x` was written: bring what shares memory with it, by torch's rules, to the same values."""
    _spread(x, set())


def _spread(x: DTensor, done: set[int]) -> None:
    """Bring what is tied to the memory of `x` by detached views to its values.

    Parts that one operation gave may share memory, and so may sources: all of a memory come to the same values before
    it counts as done.
    """
    memory = _memory(x)
    done.add(memory)
    upwards: dict[int, dict[int, list[tuple[Any, Detached]]]] = {}  # by the source's memory, then by source
    downwards: dict[int, list[tuple[Any, Detached]]] = {}  # by the view's memory
    for view in _alive(x):
        detached = _origin.get(view._mk_key)
        if detached is None:
            continue
        source = detached.source
        if _memory(view) == memory and _memory(source) not in done:
            upwards.setdefault(_memory(source), {}).setdefault(id(source), []).append((view, detached))
        elif _memory(source) == memory and _memory(view) not in done:
            downwards.setdefault(_memory(view), []).append((view, detached))
    for by_source in upwards.values():
        source = x
        for views in by_source.values():
            source = views[0][1].source
            whole = whole_of(source).clone()
            for view, detached in views:
                detached.of(whole).copy_(whole_of(view))
            write(source, whole)
        _spread(source, done)
    for views in downwards.values():
        for view, detached in views:
            write(view, detached.of(whole_of(detached.source)))
        _spread(views[0][0], done)


def _memory(x: DTensor) -> int:
    """What tensors that share memory have in common."""
    return x._local_tensor.untyped_storage()._cdata


def _alive(x: DTensor) -> list[Any]:
    group = _views.get(_memory(x))
    if group is None:
        return []
    living = [(ref, view) for ref in group if (view := ref()) is not None]
    group[:] = [ref for ref, _ in living]
    return [view for _, view in living]
