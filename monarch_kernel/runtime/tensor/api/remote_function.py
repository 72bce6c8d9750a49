"""``remote``: functions of a program's own, which ranks run like operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from monarch_kernel.runtime.tensor.api.fetching import mesh_of_all
from monarch_kernel.runtime.tensor.controller.adjoints import without_gradient
from monarch_kernel.runtime.tensor.controller.engine import handles_in
from monarch_kernel.runtime.tensor.rank.objects import NamedFunction

#: How the shapes of results are found: a function of fake tensors, or one of the words below.
Propagate = Callable[..., Any] | str | None


class RemoteFunction:
    """A function that every rank of the mesh of its arguments (or of the active mesh) calls with its own values.

    Attributes:
        function: what ranks call.
        path: its name, if it was given by name.
        name: what errors call it.
    """

    def __init__(self, function: Callable[..., Any] | str, propagate: Propagate) -> None:
        if isinstance(function, str):
            self.name, self.function, self.path = function, NamedFunction(function), function
        else:
            if not callable(function):
                raise TypeError(f"remote(function): {function!r} cannot be called")
            self.name, self.function = getattr(function, "__qualname__", repr(function)), function
            self.path: str | None = None
            functools.update_wrapper(self, function)
        if propagate == "inspect":
            raise ValueError('propagate="inspect" is not supported: give a function of the shapes')
        if isinstance(propagate, str) and propagate not in ("mocked", "cached"):
            raise ValueError(f"propagate={propagate!r}: give a function, or None for one that returns nothing")
        self._propagate = propagate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mesh = mesh_of_all((args, kwargs))
        propagate = self.shapes
        if propagate is None:
            return mesh.call(self.function, _nothing, *args, **kwargs)
        results = mesh.call(self.function, propagate, *args, **kwargs)
        return without_gradient(f"what {self!r} gave", results, handles_in((args, kwargs)))

    @property
    def shapes(self) -> Callable[..., Any] | None:
        """The function of fake tensors that tells the shapes of the results."""
        return self.function if isinstance(self._propagate, str) else self._propagate

    def __repr__(self) -> str:
        return f"<remote {self.name}>"


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


@overload
def remote(function: Callable[..., Any] | str, *, propagate: Propagate = None) -> RemoteFunction: ...
@overload
def remote(*, propagate: Propagate = None) -> Callable[[Callable[..., Any]], RemoteFunction]: ...
def remote(function: Any = None, *, propagate: Propagate = None) -> Any:
    """Make a function one that ranks run, in order with their operations.

    Args:
        function: a function (pickled once), or the name ``"module.function"`` of one that ranks can import.
        propagate: a function of fake tensors that returns what the results look like; None if it returns nothing.
    """
    if function is None:
        return lambda f: RemoteFunction(f, propagate)
    return RemoteFunction(function, propagate)
