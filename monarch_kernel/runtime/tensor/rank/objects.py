"""Functions of the controller that create and use objects and modules on this rank."""

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return getattr(importlib.import_module(self.module), self.name)(*args, **kwargs)


class Construct:
    """A function of the ranks that creates an object and returns a reference to it."""

    def __init__(self, constructor: Callable[..., Any]) -> None:
        self.__name__ = f"constructor of {getattr(constructor, '__name__', constructor)}"
        self._constructor = constructor

    def __call__(self, *args: Any, **kwargs: Any) -> OpaqueRef:
        """Return the reference, which has the object."""
        return OpaqueRef(self._constructor(*args, **kwargs))


class WithoutResult:
    """A function of the ranks that is called for its effects and returns nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__: str = getattr(function, "__name__", str(function))
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the function."""
        self._function(*args, **kwargs)


class CallMethod:
    """A function of the ranks that calls a method of an object. "" calls the object itself."""

    def __init__(self, method: str) -> None:
        self.__name__ = method or "__call__"
        self._method = method

    def __call__(self, ref: OpaqueRef, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the method."""
        function = getattr(ref.value, self._method) if self._method else ref.value
        return detached(function(*args, **kwargs))


def describe_object(ref: OpaqueRef) -> Any:
    """Return the form of an object, as for a result of a function."""
    return description(ref.value)


def object_of(ref: OpaqueRef) -> Any:
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


def forward(ref: OpaqueRef, learning: tuple[int, ...], args: Any, kwargs: Any) -> tuple[Any, OpaqueRef]:
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

    def __call__(self, learning: tuple[int, ...], *args: Any) -> tuple[Any, OpaqueRef]:
        """Return the result of the function, and the forward pass.

        Args:
            learning: the positions of the arguments that require grad.
        """
        inputs: list[Any] = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        for k in learning:
            inputs[k].requires_grad_()
        with torch.set_grad_enabled(bool(learning)):
            result: Any = self._function.apply(*inputs)
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
