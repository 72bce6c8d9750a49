"""Describe results of functions of the ranks that are nested, or contain more than tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from monarch_kernel.runtime.tensor.controller.opaque_ref import OpaqueRef


class ValueLike(NamedTuple):
    """A value that stays on the ranks: a tensor of this size, stride and dtype, or an object."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    opaque: bool = False

    def fits(self, value: Any) -> bool:
        """Return whether a value matches."""
        if self.opaque:
            return isinstance(value, OpaqueRef)
        return isinstance(value, torch.Tensor) and (tuple(value.shape), value.dtype) == (self.size, self.dtype)

    def fake(self) -> torch.Tensor:
        """Create a fake tensor like it; for an object, like its handle."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)

    def __str__(self) -> str:
        return "an OpaqueRef" if self.opaque else f"{self.dtype} {list(self.size)}"


#: The description of an object: its handle is a tensor like this.
OBJECT = ValueLike((), (), torch.int64, True)


class ResultLike:
    """The form of a result: descriptions of the values that stay on the ranks, and all other parts unchanged.

    Attributes:
        likes: for each value that stays: its position among the leaves, and its description.
        leaves, tree: the result.
        key: equal for results of the same form.
    """

    def __init__(self, result: Any) -> None:
        """Describe a result. It may contain descriptions in place of values."""
        leaves, self.tree = tree_flatten(description(result), is_leaf=_is_like)
        self.leaves: list[Any] = leaves
        self.likes = tuple((k, x) for k, x in enumerate(leaves) if _is_like(x))
        self.key = self.tree, tuple(_part(x) for x in leaves)

    def fakes(self) -> tuple[torch.Tensor, ...]:
        """Create tensors like the values that stay on the ranks."""
        return tuple(like.fake() for _, like in self.likes)

    def fake(self) -> Any:
        """Create a result of this form with fake tensors."""
        return self.filled([OpaqueRef() if like.opaque else like.fake() for _, like in self.likes])

    def filled(self, values: Any) -> Any:
        """Return the result with these values in place of the values that stay on the ranks."""
        leaves = list(self.leaves)
        for (position, _), value in zip(self.likes, values):
            leaves[position] = value
        return tree_unflatten(leaves, self.tree)

    def taken(self, label: str, result: Any) -> list[Any]:
        """Return the values of a result that stay on the ranks.

        Raises:
            TypeError: the result does not have this form.
        """
        if not self.likes:
            return []
        leaves = tree_flatten(result)[0]
        if len(leaves) != len(self.leaves):
            raise TypeError(f"{label} gave {len(leaves)} values, where its propagate says {len(self.leaves)}")
        for position, like in self.likes:
            value = leaves[position]
            if not like.fits(value):
                what = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
                raise TypeError(f"{label} gave {what}, where its propagate says {like}")
        return [leaves[position] for position, _ in self.likes]

    def __reduce__(self) -> Any:
        return _rebuilt, (self.filled([like for _, like in self.likes]),)


class FlatResult:
    """A function of the ranks that returns its result as a flat list of the values that stay there."""

    def __init__(self, function: Callable[..., Any], like: ResultLike) -> None:
        self.__name__: str = getattr(function, "__name__", str(function))
        self._function = function
        self._like = like

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self._like.taken(self.__name__, self._function(*args, **kwargs))


def description(result: Any) -> Any:
    """Return a result with descriptions in place of the values that stay on the ranks."""
    return tree_map(_described, result, is_leaf=_is_like)


def detached(result: Any) -> Any:
    """Return a result with its tensors detached."""
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, result)


def is_plain(result: Any) -> bool:
    """Return whether a result needs no `ResultLike`: None, a tensor, or a flat list or tuple of tensors."""
    if type(result) in (list, tuple):
        return bool(result) and all(x is None or isinstance(x, torch.Tensor) for x in result)
    return result is None or isinstance(result, torch.Tensor)


def part_of_key(x: Any) -> Any:
    """Return the properties of an argument or constant that determine results.

    These are shape and dtype of a tensor, and type and value of anything else.
    """
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.dtype
    return _part(x)


def _part(x: Any) -> Any:
    try:
        hash(x)
    except TypeError:
        return type(x), repr(x)
    return type(x), x


def _rebuilt(result: Any) -> ResultLike:
    return ResultLike(result)


def _is_like(x: Any) -> bool:
    return type(x) is ValueLike


def _described(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return ValueLike(tuple(x.shape), x.stride(), x.dtype)
    return OBJECT if isinstance(x, OpaqueRef) else x
