"""Synchronise views that are copies: a row along the sharded dimension of a tensor is fetched from another rank.

In torch, writing a view writes its source, and vice versa. If its layout makes a view a copy, the view is *detached*:
this module records its origin, and updates both sides after an operation that writes one of them. All ranks decide the
same way, because only the layout determines whether a view is detached, never the memory of a rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_kernel.runtime.tensor.sharded.rank.layout import whole_of, write


class Detached:
    """The origin of a detached view: ``operation(source, *args, **kwargs)[index]``."""

    __slots__ = ("args", "index", "kwargs", "operation", "source")

    def __init__(
        self,
        source: DTensor,
        operation: Callable[..., Any],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        index: int | None,
    ) -> None:
        self.source = source
        self.operation = operation
        self.args = args
        self.kwargs = kwargs
        self.index = index

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Compute the view from the whole source."""
        out = self.operation(whole, *self.args, **self.kwargs)
        return out if self.index is None else out[self.index]


#: The source of each detached view, and views by the memory of their source and by their own memory.
_origin: weakref.WeakKeyDictionary[_Key, Detached] = weakref.WeakKeyDictionary()
_views: dict[int, list[weakref.ref[DTensor]]] = {}
#: At this number of groups of views, dead views are removed.
MANY = 1024


class _Key:
    """A key for a DTensor in tables. The tensor's ``==`` compares values."""

    __slots__ = ("__weakref__",)


def detach(
    view: DTensor | Sequence[DTensor],
    operation: Callable[..., Any],
    source: DTensor,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> None:
    """Record that these results of a view operation are copies of parts of `source`."""
    if len(_views) > MANY:
        for memory in [m for m, group in _views.items() if not any(ref() is not None for ref in group)]:
            del _views[memory]
    each: Sequence[Any] = [view] if isinstance(view, DTensor) else view
    for index, one in enumerate(each):
        key = one._mk_key = _Key()
        _origin[key] = Detached(source, operation, args, kwargs, None if each is not view else index)
        for memory in {_memory(source), _memory(one)}:
            _views.setdefault(memory, []).append(weakref.ref(one))


def keep_source(view: DTensor | Sequence[DTensor], source: DTensor) -> None:
    """Keep `source` alive as long as a view that shares its memory, because `source` may be a detached view."""
    if _origin:
        each: Sequence[Any] = [view] if isinstance(view, DTensor) else view
        for one in each:
            one._mk_source = source


def sources() -> list[DTensor]:
    """Return the sources of detached views."""
    return [detached.source for detached in _origin.values()]


def any_detached() -> bool:
    """Return whether a write must search for views."""
    return bool(_origin)


def written(x: DTensor) -> None:
    """Update all tensors that share memory with `x` by torch's rules, after a write to `x`."""
    _spread(x, set())


def _spread(x: DTensor, done: set[int]) -> None:
    """Update all tensors that are tied to the memory of `x` through detached views.

    Results of one operation may share memory, and so may sources. All tensors of one memory are updated before it
    counts as done.
    """
    memory = _memory(x)
    done.add(memory)
    upwards: dict[int, dict[int, list[tuple[DTensor, Detached]]]] = {}  # by the source's memory, then by source
    downwards: dict[int, list[tuple[DTensor, Detached]]] = {}  # by the view's memory
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
    """Return the identity of a tensor's memory."""
    return x._local_tensor.untyped_storage()._cdata


def _alive(x: DTensor) -> list[Any]:
    group = _views.get(_memory(x))
    if group is None:
        return []
    living = [(ref, view) for ref in group if (view := ref()) is not None]
    group[:] = [ref for ref, _ in living]
    return [view for _, view in living]
