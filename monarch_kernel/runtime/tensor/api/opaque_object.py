"""`OpaqueObject`: an object on every rank, driven by its methods from the controller."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._pytree import tree_flatten

from monarch_kernel.runtime.tensor.api.fetching import call_on_shard_and_fetch, mesh_of_all
from monarch_kernel.runtime.tensor.api.learning import argument_key
from monarch_kernel.runtime.tensor.controller.adjoints import without_gradient
from monarch_kernel.runtime.tensor.controller.engine import handles_in
from monarch_kernel.runtime.tensor.controller.fetched_values import FetchedValues
from monarch_kernel.runtime.tensor.controller.opaque_ref import OpaqueRef
from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh
from monarch_kernel.runtime.tensor.rank.objects import CallMethod, Construct, NamedFunction
from monarch_kernel.runtime.tensor.rank.results import ResultLike


class OpaqueObject(OpaqueRef):
    """An object on every rank of the active mesh, of which this is the controller's side.

    ```python
    class Table(OpaqueObject):
        @opaque_method
        def look_up(self, keys: torch.Tensor):  # says what the result looks like
            return keys.new_empty(len(keys), 16, dtype=torch.float32)


    with mesh.activate():
        table = Table("package.module.Table", 1000)  # built on every rank
        rows = table.look_up(torch.tensor([3, 5]))  # each rank's own result, in order with its operations
    ```

    When the last reference here goes, each rank lets go of its object. What an object's method raises is a
    ``RemoteException`` at the next fetch that depends on its result. Gradients do not pass: a backward pass that
    comes to such a result raises.

    Args:
        constructor: the name of a class or function that ranks can import, one of this program, or the `OpaqueRef` of
            an object that there is already.
        args, kwargs: for the constructor; ranks get their values in the places of tensors.
    """

    def __init__(self, constructor: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._known: dict[Any, ResultLike] = {}
        if isinstance(constructor, OpaqueRef):
            self._key = constructor.key
            return
        make = NamedFunction(constructor) if isinstance(constructor, str) else constructor
        mesh = mesh_of_all((args, kwargs))
        made = mesh.call(Construct(make), lambda *_, **__: OpaqueRef(), *args, **kwargs, key=("construct", constructor))
        self._key = made.key

    def call_method(self, method_name: str, propagation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method on every rank.

        Args:
            method_name: a method of the ranks' object; "" calls the object itself.
            propagation: called as ``propagation(self, *args, **kwargs)`` with tensors without values, once for each
                kind of arguments: returns tensors like the results. What else is in its result is returned as it is.
        """
        like = self._looks_like(method_name, propagation, args, kwargs)
        result = self._mesh.call(
            CallMethod(method_name), lambda *_, **__: like.fake(), self, *args, **kwargs, key=(method_name, like.key)
        )
        return without_gradient(
            f"what {method_name or 'the call'} of {self!r} gave", result, handles_in((args, kwargs))
        )

    def call_method_on_shard_and_fetch(
        self, method_name: str, *args: Any, shard: Mapping[str, int] | None = None, **kwargs: Any
    ) -> FetchedValues:
        """Call a method on every rank, and fetch what it gave on one of them: anything that can be pickled.

        Args:
            shard: coordinates of that rank; dimensions that are not named are 0.
        """
        return call_on_shard_and_fetch(CallMethod(method_name), self, *args, shard=shard, **kwargs)

    @property
    def _mesh(self) -> TensorMesh:
        return self.key._spec.mesh

    def _looks_like(self, method: str, propagation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ResultLike:
        flat, tree = tree_flatten((args, kwargs))
        key = method, propagation, tree, tuple(map(argument_key, flat))
        like = self._known.get(key)
        if like is None:
            like = self._known[key] = self._mesh.propagated(functools.partial(propagation, self), (args, kwargs))
        return like


def opaque_method(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of an `OpaqueObject` the ranks' method of its name; its body says what the result looks like."""

    @functools.wraps(fn)
    def method(self: OpaqueObject, *args: Any, **kwargs: Any) -> Any:
        return self.call_method(fn.__name__, fn, *args, **kwargs)

    return method
