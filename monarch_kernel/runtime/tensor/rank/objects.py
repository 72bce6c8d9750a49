"""Objects and modules that live on this rank: functions that the controller calls here."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_kernel.runtime.tensor.controller.opaque_ref import OpaqueRef
from monarch_kernel.runtime.tensor.rank.results import description, detached


class NamedFunction:
    """A function or class by name, looked up where it is called: the controller need not have it.

    Raises:
        ValueError: the name has no module, and is none of Python's builtins.
    """

    def __init__(self, name: str) -> None:
        module, _, rest = name.rpartition(".")
        if not module and not hasattr(builtins, name):
            raise ValueError(f"{name!r}: name it as module.function")
        self.module, self.name = module or "builtins", rest
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return getattr(importlib.import_module(self.module), self.name)(*args, **kwargs)


class Construct:
    """Makes an object and refers to it."""

    def __init__(self, constructor: Callable[..., Any]) -> None:
        self.__name__ = f"constructor of {getattr(constructor, '__name__', constructor)}"
        self._constructor = constructor

    def __call__(self, *args: Any, **kwargs: Any) -> OpaqueRef:
        """The reference, with the object."""
        return OpaqueRef(self._constructor(*args, **kwargs))


class WithoutResult:
    """Calls a function for what it does."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__: str = getattr(function, "__name__", str(function))
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call it."""
        self._function(*args, **kwargs)


class CallMethod:
    """Calls a method of an object; "" calls the object itself."""

    def __init__(self, method: str) -> None:
        self.__name__ = method or "__call__"
        self._method = method

    def __call__(self, ref: OpaqueRef, *args: Any, **kwargs: Any) -> Any:
        """What the method gives."""
        function = getattr(ref.value, self._method) if self._method else ref.value
        return detached(function(*args, **kwargs))


def describe_object(ref: OpaqueRef) -> Any:
    """What an object looks like, if it is the result of a function."""
    return description(ref.value)


def object_of(ref: OpaqueRef) -> Any:
    """The object itself."""
    return ref.value


class ParameterLike(NamedTuple):
    """A parameter of a module, without its values."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    learns: bool


def describe_parameters(ref: OpaqueRef) -> list[ParameterLike]:
    """The parameters of a module, in its order."""
    return [
        ParameterLike(name, tuple(p.shape), p.stride(), p.dtype, p.requires_grad)
        for name, p in ref.value.named_parameters()
    ]


def take_parameters(ref: OpaqueRef) -> list[torch.Tensor]:
    """The parameters of a module: tensors of the same memory."""
    return [p.detach() for p in ref.value.parameters()]


class _ForwardPass(NamedTuple):
    """What a backward pass needs of a forward pass."""

    learning: list[torch.Tensor]
    results: list[torch.Tensor]


def forward(ref: OpaqueRef, learning: tuple[int, ...], args: Any, kwargs: Any) -> tuple[Any, OpaqueRef]:
    """Call a module so that its backward pass can follow.

    Args:
        learning: which leaves of the arguments require grad.

    Returns:
        Its result, and the forward pass.
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
    """Applies a ``torch.autograd.Function`` so that its backward pass can follow."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.__name__ = function.__name__
        self._function = function

    def __call__(self, learning: tuple[int, ...], *args: Any) -> tuple[Any, OpaqueRef]:
        """Its result, and the forward pass.

        Args:
            learning: positions of the arguments that require grad.
        """
        inputs: list[Any] = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        for k in learning:
            inputs[k].requires_grad_()
        with torch.set_grad_enabled(bool(learning)):
            result: Any = self._function.apply(*inputs)
        found = [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]
        return detached(result), OpaqueRef(_ForwardPass([inputs[k] for k in learning], found))


def backward(ref: OpaqueRef, *gradients: torch.Tensor | None) -> list[torch.Tensor]:
    """Gradients of what requires grad: of inputs, then of parameters."""
    ran: _ForwardPass = ref.value
    given = [(r, g) for r, g in zip(ran.results, gradients) if g is not None and r.requires_grad]
    if not given:
        return [torch.zeros_like(x) for x in ran.learning]
    found: tuple[Any, ...] = torch.autograd.grad(
        [r for r, _ in given], ran.learning, [g for _, g in given], allow_unused=True, retain_graph=True
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(ran.learning, found)]
