"""``remote``: functions of a program's own, which ranks run like operations."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, overload

from monarch_kernel.runtime.tensor.api.fetching import mesh_of_all
from monarch_kernel.runtime.tensor.api.learning import call_learnt
from monarch_kernel.runtime.tensor.controller.adjoints import without_gradient
from monarch_kernel.runtime.tensor.controller.engine import handles_in
from monarch_kernel.runtime.tensor.controller.fetched_values import FetchedMesh, FetchedValues
from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh
from monarch_kernel.runtime.tensor.rank.objects import NamedFunction, WithoutResult

#: How the shapes of results are found: a function of fake tensors, or one of the words below.
Propagate = Callable[..., Any] | str | None


#: Functions that get what ``remote`` is given, and return the function or name for it; None: the next one is asked.
function_resolvers: list[Callable[[Any], Callable[..., Any] | str | None]] = []


class RemoteFunction:
    """A function that every rank of the mesh of its arguments (or of the active mesh) calls with its own values.

    Attributes:
        function: what ranks call.
        path: its name, if it was given by name.
        name: what errors call it.
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
        """The function of fake tensors that tells the shapes of the results; None if only a call can tell."""
        if self._propagate in (None, "cached"):
            return None
        return self._propagate if callable(self._propagate) else self.function

    def rref(self, *args: Any, **kwargs: Any) -> Any:
        """The same as calling it: what it gives stays on the ranks."""
        return self(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> FetchedMesh:
        """Call it on every rank, in order with their operations; a future of a ``ValueMesh`` of what it gave."""
        mesh, call = self._fetched(args, kwargs, -1)
        return FetchedMesh(mesh, call, self.name)

    def call_one(self, *args: Any, **kwargs: Any) -> FetchedValues:
        """Call it on the only rank of the mesh; a future of what it gave.

        Raises:
            ValueError: the mesh has more than one rank.
        """
        size = len(mesh_of_all((args, kwargs)).ranks)
        if size != 1:
            raise ValueError(f"call_one requires exactly 1 actor, but mesh has {size}: activate a slice, or use call")
        return self._one(0, args, kwargs)

    def choose(self, *args: Any, **kwargs: Any) -> FetchedValues:
        """Call it on every rank, and fetch what one of them gave, chosen at random."""
        return self._one(random.randrange(len(mesh_of_all((args, kwargs)).ranks)), args, kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[FetchedValues]:
        """Call it on every rank; a future for each rank, in their order."""
        mesh, call = self._fetched(args, kwargs, -1)
        return iter([FetchedValues.of_call(mesh, call, rank, self.name) for rank in range(len(mesh.ranks))])

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Call it on every rank, and do not wait for it, nor look at what it gives."""
        mesh_of_all((args, kwargs)).call(
            WithoutResult(self.function), _nothing, *args, **kwargs, key=("ignored", self.function)
        )

    def _one(self, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FetchedValues:
        mesh, call = self._fetched(args, kwargs, rank)
        return FetchedValues.of_call(mesh, call, rank, self.name)

    def _fetched(self, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int) -> tuple[TensorMesh, Any]:
        mesh = mesh_of_all((args, kwargs))
        return mesh, mesh.engine.call_on_ranks(mesh, self.function, args, kwargs, rank)

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
        propagate: a function of fake tensors that returns what the results look like; "mocked": the function itself is
            called with such; None or "cached": the first call of a kind of arguments waits for its result to learn it,
            and what is no tensor in later results is what it was then. A function that returns nothing waits at no
            call with "inspect": it is called for what it does, and what it gives is None here.
    """
    if function is None:
        return lambda f: RemoteFunction(f, propagate)
    return RemoteFunction(function, propagate)
