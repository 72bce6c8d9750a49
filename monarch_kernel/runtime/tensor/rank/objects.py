"""Functions of the controller that create and use objects and modules on this rank."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from monarch_kernel.runtime.tensor.controller.opaque_ref import OpaqueRef

if TYPE_CHECKING:
    from collections.abc import Sequence

# Describe results of functions of the ranks that are nested, or contain more than tensors.


class ValueLike(NamedTuple):
    """A value that stays on the ranks: a tensor of this size, stride and dtype, or an object."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    opaque: bool = False

    def fits(self, value: object) -> bool:
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

    def __init__(self, result: object) -> None:
        """Describe a result. It may contain descriptions in place of values."""
        leaves, self.tree = tree_flatten(description(result), is_leaf=_is_like)
        self.leaves: list[object] = leaves
        self.likes = tuple((k, x) for k, x in enumerate(leaves) if _is_like(x))
        self.key = self.tree, tuple(_part(x) for x in leaves)

    def fakes(self) -> tuple[torch.Tensor, ...]:
        """Create tensors like the values that stay on the ranks."""
        return tuple(like.fake() for _, like in self.likes)

    def fake(self) -> object:
        """Create a result of this form with fake tensors."""
        return self.filled([OpaqueRef() if like.opaque else like.fake() for _, like in self.likes])

    def filled(self, values: Sequence[object]) -> object:
        """Return the result with these values in place of the values that stay on the ranks."""
        leaves = list(self.leaves)
        for (position, _), value in zip(self.likes, values):
            leaves[position] = value
        return tree_unflatten(leaves, self.tree)

    def taken(self, label: str, result: object) -> list[Any]:
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

    def __call__(self, *args: object, **kwargs: object) -> list[object]:
        return self._like.taken(self.__name__, self._function(*args, **kwargs))


def description(result: object) -> object:
    """Return a result with descriptions in place of the values that stay on the ranks."""
    return tree_map(_described, result, is_leaf=_is_like)


def detached(result: object) -> Any:
    """Return a result with its tensors detached."""
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, result)


def is_plain(result: Any) -> bool:
    """Return whether a result needs no `ResultLike`: None, a tensor, or a flat list or tuple of tensors."""
    if type(result) in (list, tuple):
        return bool(result) and all(x is None or isinstance(x, torch.Tensor) for x in result)
    return result is None or isinstance(result, torch.Tensor)


def part_of_key(x: object) -> object:
    """Return the properties of an argument or constant that determine results.

    These are shape and dtype of a tensor, and type and value of anything else.
    """
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.dtype
    return _part(x)


def _part(x: object) -> object:
    try:
        hash(x)
    except TypeError:
        return type(x), repr(x)
    return type(x), x


def _rebuilt(result: object) -> ResultLike:
    return ResultLike(result)


def _is_like(x: object) -> bool:
    return type(x) is ValueLike


def _described(x: object) -> object:
    if isinstance(x, torch.Tensor):
        return ValueLike(tuple(x.shape), x.stride(), x.dtype)
    return OBJECT if isinstance(x, OpaqueRef) else x


class NamedFunction:
    """A function or class by name, which is looked up where it is called. The controller need not have it.

    Raises:
        ValueError: the name has no module, and is not one of Python's builtins.
    """

    def __init__(self, name: str) -> None:
        module, _, rest = name.rpartition(".")
        if not module and not hasattr(builtins, name):
            raise ValueError(f"{name!r}: name it as module.function")
        self.module, self.name = module or "builtins", rest
        self.__name__ = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the function."""
        return getattr(importlib.import_module(self.module), self.name)(*args, **kwargs)


class Construct:
    """A function of the ranks that creates an object and returns a reference to it."""

    def __init__(self, constructor: Callable[..., object]) -> None:
        self.__name__ = f"constructor of {getattr(constructor, '__name__', constructor)}"
        self._constructor = constructor

    def __call__(self, *args: object, **kwargs: object) -> OpaqueRef:
        """Return the reference, which has the object."""
        return OpaqueRef(self._constructor(*args, **kwargs))


class WithoutResult:
    """A function of the ranks that is called for its effects and returns nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__: str = getattr(function, "__name__", str(function))
        self._function = function

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Call the function."""
        self._function(*args, **kwargs)


class CallMethod:
    """A function of the ranks that calls a method of an object. "" calls the object itself."""

    def __init__(self, method: str) -> None:
        self.__name__ = method or "__call__"
        self._method = method

    def __call__(self, ref: OpaqueRef, *args: object, **kwargs: object) -> object:
        """Return the result of the method."""
        function = getattr(ref.value, self._method) if self._method else ref.value
        return detached(function(*args, **kwargs))


def describe_object(ref: OpaqueRef) -> object:
    """Return the form of an object, as for a result of a function."""
    return description(ref.value)


def object_of(ref: OpaqueRef) -> object:
    """Return the object of a reference."""
    return ref.value


class ParameterLike(NamedTuple):
    """A parameter of a module, without its values."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    learns: bool


def describe_parameters(ref: OpaqueRef) -> list[ParameterLike]:
    """Describe the parameters of a module, in its order."""
    return [
        ParameterLike(name, tuple(p.shape), p.stride(), p.dtype, p.requires_grad)
        for name, p in ref.value.named_parameters()
    ]


def take_parameters(ref: OpaqueRef) -> list[torch.Tensor]:
    """Return the parameters of a module as tensors that share their memory."""
    return [p.detach() for p in ref.value.parameters()]


class _ForwardPass(NamedTuple):
    """The data of a forward pass that its backward pass needs."""

    learning: list[torch.Tensor]
    results: list[torch.Tensor]


def forward(
    ref: OpaqueRef, learning: tuple[int, ...], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[Any, OpaqueRef]:
    """Call a module and keep the data for a later backward pass.

    Args:
        learning: the leaves of the arguments that require grad.

    Returns:
        The result of the module, and the forward pass.
    """
    flat, tree = tree_flatten((args, kwargs))
    inputs: list[Any] = [x.detach() if isinstance(x, torch.Tensor) else x for x in flat]
    for k in learning:
        inputs[k].requires_grad_()
    args, kwargs = tree_unflatten(inputs, tree)
    with torch.enable_grad():
        result = ref.value(*args, **kwargs)
    found = [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]
    learned = [inputs[k] for k in learning] + [p for p in ref.value.parameters() if p.requires_grad]
    return detached(result), OpaqueRef(_ForwardPass(learned, found))


class ApplyFunction:
    """Applies a ``torch.autograd.Function`` and keeps the data for a later backward pass."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.__name__ = function.__name__
        self._function = function

    def __call__(self, learning: tuple[int, ...], *args: object) -> tuple[object, OpaqueRef]:
        """Return the result of the function, and the forward pass.

        Args:
            learning: the positions of the arguments that require grad.
        """
        inputs: list[Any] = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        for k in learning:
            inputs[k].requires_grad_()
        with torch.set_grad_enabled(bool(learning)):
            result = self._function.apply(*inputs)
        found = [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]
        return detached(result), OpaqueRef(_ForwardPass([inputs[k] for k in learning], found))


def backward(ref: OpaqueRef, *gradients: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the gradients of the inputs, then of the parameters, that require grad."""
    ran: _ForwardPass = ref.value
    given = [(r, g) for r, g in zip(ran.results, gradients) if g is not None and r.requires_grad]
    if not given:
        return [torch.zeros_like(x) for x in ran.learning]
    found: tuple[Any, ...] = torch.autograd.grad(
        [r for r, _ in given], ran.learning, [g for _, g in given], allow_unused=True, retain_graph=True
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(ran.learning, found)]
