"""Objects and modules on every rank, called from the controller: `OpaqueObject` and `OpaqueModule`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_kernel.runtime.tensor.api.fetching import argument_key, call_on_shard_and_fetch, mesh_of_all
from monarch_kernel.runtime.tensor.controller.adjoints import without_gradient
from monarch_kernel.runtime.tensor.controller.engine import handles_in
from monarch_kernel.runtime.tensor.controller.fetched_values import FetchedValues
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.opaque_ref import OpaqueRef
from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh
from monarch_kernel.runtime.tensor.rank import objects
from monarch_kernel.runtime.tensor.rank.objects import CallMethod, Construct, NamedFunction, ResultLike

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec


class OpaqueObject(OpaqueRef):
    """The controller's side of an object on every rank of the active mesh.

    ```python
    class Table(OpaqueObject):
        @opaque_method
        def look_up(self, keys: torch.Tensor):  # says what the result looks like
            return keys.new_empty(len(keys), 16, dtype=torch.float32)


    with mesh.activate():
        table = Table("package.module.Table", 1000)  # built on every rank
        rows = table.look_up(torch.tensor([3, 5]))  # each rank's own result, in order with its operations
    ```

    When the last reference here is deleted, each rank releases its object. An exception in a method is raised as
    ``RemoteException`` at the next fetch that depends on its result. Gradients do not pass: a backward pass that
    reaches such a result raises.

    Args:
        constructor: the name of a class or function that ranks can import, a class or function of this program, or the
            `OpaqueRef` of an existing object.
        args, kwargs: arguments of the constructor; ranks receive their own values in place of handles.
    """

    def __init__(self, constructor: Any, *args: object, **kwargs: Any) -> None:
        super().__init__()
        self._known: dict[object, ResultLike] = {}
        if isinstance(constructor, OpaqueRef):
            self._key = constructor.key
            return
        make = NamedFunction(constructor) if isinstance(constructor, str) else constructor
        mesh = mesh_of_all((args, kwargs))
        made = mesh.call(Construct(make), lambda *_, **__: OpaqueRef(), *args, **kwargs, key=("construct", constructor))
        self._key = made.key

    def call_method(self, method_name: str, propagation: Callable[..., object], *args: object, **kwargs: Any) -> Any:
        """Call a method on every rank.

        Args:
            method_name: the name of the method; "" calls the object itself.
            propagation: called as ``propagation(self, *args, **kwargs)`` with fake tensors, once for each kind of
                arguments. It returns tensors like the results; other parts of its result are returned unchanged.
        """
        like = self._looks_like(method_name, propagation, args, kwargs)
        result = self._mesh.call(
            CallMethod(method_name), lambda *_, **__: like.fake(), self, *args, **kwargs, key=(method_name, like.key)
        )
        return without_gradient(
            f"what {method_name or 'the call'} of {self!r} gave", result, handles_in((args, kwargs))
        )

    def call_method_on_shard_and_fetch(
        self, method_name: str, *args: object, shard: Mapping[str, int] | None = None, **kwargs: object
    ) -> FetchedValues:
        """Call a method on every rank, and fetch the result of one rank, which may be any picklable object.

        Args:
            shard: coordinates of that rank; other dimensions default to 0.
        """
        return call_on_shard_and_fetch(CallMethod(method_name), self, *args, shard=shard, **kwargs)

    @property
    def _mesh(self) -> TensorMesh:
        return self.key._spec.mesh

    def _looks_like(
        self, method: str, propagation: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> ResultLike:
        flat, tree = tree_flatten((args, kwargs))
        key = method, propagation, tree, tuple(map(argument_key, flat))
        like = self._known.get(key)
        if like is None:
            like = self._known[key] = self._mesh.propagated(functools.partial(propagation, self), (args, kwargs))
        return like


def opaque_method(fn: Callable[..., object]) -> Callable[..., Any]:
    """Call the method of this name on the ranks. The decorated body describes the form of the result."""

    @functools.wraps(fn)
    def method(self: OpaqueObject, *args: object, **kwargs: object) -> object:
        return self.call_method(fn.__name__, fn, *args, **kwargs)

    return method


class OpaqueModule:
    """A ``torch.nn.Module`` with an independent copy on each rank of the active mesh.

    ```python
    with mesh.activate():
        model = OpaqueModule("torch.nn.Linear", 3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(torch.ones(2, 3), propagator=lambda self, x: x.new_empty(x.shape[0], 4))
        out.sum().backward()
        for p in model.parameters():
            p.grad.reduce_("gpus", "avg")
        optimizer.step()
    ```

    Forward and backward are one operation each. The modules of different ranks are independent: to initialise them
    equally, seed equally (``torch.manual_seed``). For one module that spans the ranks, use `RemoteModule`. If the
    result does not depend on a parameter, its gradient is zeros, not None.

    Args:
        args, kwargs: the constructor of the module and its arguments, as for `OpaqueObject`.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._object = OpaqueObject(*args, **kwargs)
        self._parameters: list[torch.nn.Parameter] | None = None

    def __repr__(self) -> str:
        return f"<OpaqueModule on {self._object._mesh!r}>"

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return handles of the parameters. Writes to them change the module. The first call costs one round trip.

        Raises:
            ValueError: the parameters differ in shape between ranks, and therefore cannot have handles.
        """
        if self._parameters is None:
            mesh, ref = self._object._mesh, self._object
            mesh.engine.plan.synchronised("the parameters of an OpaqueModule")
            found = mesh.engine.ask(mesh, objects.describe_parameters, ref.key)
            for place, other in enumerate(found):
                if other != found[0]:
                    raise ValueError(f"the parameters of rank {place} differ from those of rank 0 of mesh {mesh.name}")
            likes: list[objects.ParameterLike] = found[0]
            made = mesh.call(
                objects.take_parameters,
                lambda _: [torch.empty_strided(p.size, p.stride, dtype=p.dtype) for p in likes] or None,
                ref,
                key=("parameters", tuple(likes)),
            )
            self._parameters = [torch.nn.Parameter(t, like.learns) for t, like in zip(made or (), likes)]
        return self._parameters

    def call_method(self, method_name: str, propagation: Callable[..., object], *args: object, **kwargs: object) -> Any:
        """Call a method of the ranks' modules, as for `OpaqueObject`. Gradients do not pass."""
        return self._object.call_method(method_name, propagation, *args, **kwargs)

    def __call__(self, *args: object, propagator: Callable[..., object], **kwargs: object) -> Any:
        """Call the module on every rank. Gradients pass to its parameters and to tensors among the arguments.

        Args:
            propagator: called as ``propagator(self, *args, **kwargs)`` with fake tensors; returns tensors like the
                results.
        """
        flat, tree = tree_flatten((args, kwargs))
        learning = tuple(k for k, x in enumerate(flat) if type(x) is Tensor and x.requires_grad)
        parameters = [p for p in self.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not (learning or parameters):
            return self._object.call_method("", propagator, *args, **kwargs)
        like = self._object._looks_like("", propagator, args, kwargs)
        tensors = [flat[k] for k in learning] + parameters
        made = _Call.apply(self._object, like, learning, flat, tree, *tensors)
        return like.filled(made)


class _Call(torch.autograd.Function):
    """One forward pass and its backward pass. The ranks free their graph when torch frees its saved tensors."""

    @staticmethod
    def forward(  # type: ignore[override]  # torch's stub has other names
        ctx: Any,
        ref: OpaqueObject,
        like: ResultLike,
        learning: tuple[int, ...],
        flat: list[object],
        tree: TreeSpec,
        *tensors: Any,
    ) -> Any:
        args, kwargs = tree_unflatten([x.detach() if type(x) is Tensor else x for x in flat], tree)
        result, ran = ref._mesh.call(
            objects.forward,
            lambda *_: (like.fake(), OpaqueRef()),
            ref,
            learning,
            args,
            kwargs,
            key=("forward", like.key),
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ran.key)
        ctx.shapes = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)
        made = tree_flatten(result)[0]
        return tuple(made[position] for position, _ in like.likes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> object:  # type: ignore[override]  # torch's stub has other names
        return None, None, None, None, None, *backward_on_ranks(ctx, gradients)


def backward_on_ranks(ctx: Any, gradients: Sequence[Any]) -> Any:
    """Run the backward pass of a forward pass that is kept on the ranks.

    Args:
        ctx: holds the key of that forward pass as its saved tensor, and in ``shapes`` the size, stride and dtype of
            each returned gradient.
        gradients: the gradients of the results of the forward pass.
    """
    ran, shapes = OpaqueRef.of(ctx.saved_tensors[0]), ctx.shapes

    def alike(*_: object) -> list[torch.Tensor]:
        return [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in shapes]

    given = [None if g is None else g.detach() for g in gradients]
    return ran.key._spec.mesh.call(objects.backward, alike, ran, *given, key=("backward", shapes))
