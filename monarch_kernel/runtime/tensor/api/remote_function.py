"""Run functions of the program on the ranks like operations: ``remote``."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, overload

from monarch_kernel.runtime.tensor.api.fetching import call_learnt, mesh_of_all
from monarch_kernel.runtime.tensor.controller.adjoints import without_gradient
from monarch_kernel.runtime.tensor.controller.engine import handles_in
from monarch_kernel.runtime.tensor.controller.fetched_values import FetchedMesh, FetchedValues
from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh
from monarch_kernel.runtime.tensor.rank.objects import NamedFunction, WithoutResult

#: How to determine the shapes of results: a function of fake tensors, or one of the words below.
Propagate = Callable[..., object] | str | None


#: Functions that take an argument of ``remote`` and return the function or name for it, or None to try the next one.
function_resolvers: list[Callable[[object], Callable[..., object] | str | None]] = []


class RemoteFunction:
    """A function that every rank of the mesh of its arguments (or of the active mesh) calls with its local values.

    Attributes:
        function: the function that ranks call.
        path: its import name, if it was specified by name.
        name: its name in errors.
    """

    def __init__(self, function: Callable[..., Any] | str, propagate: Propagate) -> None:
        for resolve in function_resolvers:
            if (found := resolve(function)) is not None:
                function = found
                break
        if isinstance(function, str):
            self.name, self.function, self.path = function, NamedFunction(function), function
        else:
            if not callable(function):
                raise TypeError(f"remote(function): {function!r} cannot be called")
            self.name, self.function = getattr(function, "__qualname__", repr(function)), function
            self.path: str | None = None
            functools.update_wrapper(self, function)
        if not (propagate is None or callable(propagate) or propagate in ("inspect", "mocked", "cached")):
            raise ValueError(
                f'propagate={propagate!r}: give a function of the shapes, "inspect", "mocked", or "cached" (None)'
            )
        self._propagate = propagate

    def __call__(self, *args: object, **kwargs: Any) -> Any:
        if self._propagate == "inspect":
            return self.broadcast(*args, **kwargs)
        mesh = mesh_of_all((args, kwargs))
        shapes = self.shapes
        if shapes is None:
            results = call_learnt(mesh, self.function, args, kwargs)
        else:
            results = mesh.call(self.function, shapes, *args, **kwargs)
        return without_gradient(f"what {self!r} gave", results, handles_in((args, kwargs)))

    @property
    def shapes(self) -> Callable[..., Any] | None:
        """The function of fake tensors that computes the shapes of results; None if only a call can determine them."""
        if self._propagate in (None, "cached"):
            return None
        return self._propagate if callable(self._propagate) else self.function

    def rref(self, *args: object, **kwargs: object) -> Any:
        """Call the function. Its result stays on the ranks."""
        return self(*args, **kwargs)

    def call(self, *args: object, **kwargs: object) -> FetchedMesh:
        """Call the function on every rank, in order with their operations.

        Return a future of a ``ValueMesh`` of the results.
        """
        mesh, call = self._fetched(args, kwargs, -1)
        return FetchedMesh(mesh, call, self.name)

    def call_one(self, *args: object, **kwargs: object) -> FetchedValues:
        """Call the function on the only rank of the mesh. Return a future of its result.

        Raises:
            ValueError: the mesh has more than one rank.
        """
        size = len(mesh_of_all((args, kwargs)).ranks)
        if size != 1:
            raise ValueError(f"call_one requires exactly 1 actor, but mesh has {size}: activate a slice, or use call")
        return self._one(0, args, kwargs)

    def choose(self, *args: object, **kwargs: object) -> FetchedValues:
        """Call the function on every rank, and fetch the result of a random rank."""
        return self._one(random.randrange(len(mesh_of_all((args, kwargs)).ranks)), args, kwargs)

    def stream(self, *args: object, **kwargs: object) -> Iterator[FetchedValues]:
        """Call the function on every rank. Yield a future for each rank, in rank order."""
        mesh, call = self._fetched(args, kwargs, -1)
        return iter([FetchedValues.of_call(mesh, call, rank, self.name) for rank in range(len(mesh.ranks))])

    def broadcast(self, *args: object, **kwargs: Any) -> None:
        """Call the function on every rank without waiting, and ignore the results."""
        mesh_of_all((args, kwargs)).call(
            WithoutResult(self.function), _nothing, *args, **kwargs, key=("ignored", self.function)
        )

    def _one(self, rank: int, args: tuple[object, ...], kwargs: dict[str, object]) -> FetchedValues:
        mesh, call = self._fetched(args, kwargs, rank)
        return FetchedValues.of_call(mesh, call, rank, self.name)

    def _fetched(self, args: tuple[object, ...], kwargs: dict[str, object], rank: int) -> tuple[TensorMesh, object]:
        mesh = mesh_of_all((args, kwargs))
        return mesh, mesh.engine.call_on_ranks(mesh, self.function, args, kwargs, rank)

    def __repr__(self) -> str:
        return f"<remote {self.name}>"


def _nothing(*args: object, **kwargs: object) -> None:
    return None


@overload
def remote(function: Callable[..., object] | str, *, propagate: Propagate = None) -> RemoteFunction: ...
@overload
def remote(*, propagate: Propagate = None) -> Callable[[Callable[..., Any]], RemoteFunction]: ...
def remote(function: Any = None, *, propagate: Propagate = None) -> Any:
    """Make a function that ranks run, in order with their operations.

    Args:
        function: a function (pickled once), or the name ``"module.function"`` of one that ranks can import.
        propagate: how to determine the form of the results. A function is called with fake tensors and returns tensors
            like the results. "mocked" calls `function` itself with fake tensors. None or "cached" waits for the result
            of the first call with each kind of arguments; parts that are not tensors stay the same in later results.
            "inspect" is for functions called for their effects: no call waits, and the result here is None.
    """
    if function is None:
        return lambda f: RemoteFunction(f, propagate)
    return RemoteFunction(function, propagate)
