"""`OpaqueModule`: a module on every rank, whose parameters are handles here and through which gradients pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_kernel.runtime.tensor.api.opaque_object import OpaqueObject
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.opaque_ref import OpaqueRef
from monarch_kernel.runtime.tensor.rank import objects
from monarch_kernel.runtime.tensor.rank.results import ResultLike


class OpaqueModule:
    """A ``torch.nn.Module`` that each rank of the active mesh has for itself.

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

    Forward and backward are one operation each. Modules of different ranks know nothing of each other: seed alike
    (``torch.manual_seed``) what is to begin alike. `RemoteModule` is for modules that are one over the ranks. The
    gradient of a parameter on which the result does not depend is zeros, and not None.

    Args:
        args, kwargs: as for `OpaqueObject`: what builds the module, and arguments for that.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._object = OpaqueObject(*args, **kwargs)
        self._parameters: list[torch.nn.Parameter] | None = None

    def __repr__(self) -> str:
        return f"<OpaqueModule on {self._object._mesh!r}>"

    def parameters(self) -> list[torch.nn.Parameter]:
        """Handles of the parameters; what is written to them is written to the module. One round trip, the first time.

        Raises:
            ValueError: the parameters of ranks differ in shape, so that no handle could stand for them.
        """
        if self._parameters is None:
            mesh, ref = self._object._mesh, self._object
            mesh.engine.plan.synchronised("the parameters of an OpaqueModule")
            found = mesh.engine.ask(mesh, objects.describe_parameters, ref.key)
            for place, other in enumerate(found):
                if other != found[0]:
                    raise ValueError(f"the parameters of rank {place} differ from those of rank 0 of mesh {mesh.name}")
            likes: list[objects.ParameterLike] = found[0]
            made: Any = mesh.call(
                objects.take_parameters,
                lambda _: [torch.empty_strided(p.size, p.stride, dtype=p.dtype) for p in likes] or None,
                ref,
                key=("parameters", tuple(likes)),
            )
            self._parameters = [torch.nn.Parameter(t, like.learns) for t, like in zip(made or (), likes)]
        return self._parameters

    def call_method(self, method_name: str, propagation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the ranks' modules, as of an `OpaqueObject`: gradients do not pass."""
        return self._object.call_method(method_name, propagation, *args, **kwargs)

    def __call__(self, *args: Any, propagator: Callable[..., Any], **kwargs: Any) -> Any:
        """Call the module on every rank; gradients pass to its parameters and to tensors among the arguments.

        Args:
            propagator: called as ``propagator(self, *args, **kwargs)`` with tensors without values: returns tensors
                like the results.
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
    """One forward pass, and its backward pass. The graph on the ranks goes when torch frees what was saved for it."""

    @staticmethod
    def forward(  # type: ignore[override]  # torch's stub has other names
        ctx: Any,
        ref: OpaqueObject,
        like: ResultLike,
        learning: tuple[int, ...],
        flat: list[Any],
        tree: Any,
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
        ctx.shapes = [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]
        made = tree_flatten(result)[0]
        return tuple(made[position] for position, _ in like.likes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]  # torch's stub has other names
        ran = OpaqueRef.of(ctx.saved_tensors[0])
        shapes = tuple(ctx.shapes)

        def alike(*_: Any) -> list[torch.Tensor]:
            return [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in shapes]

        given = [None if g is None else g.detach() for g in gradients]
        found = ran.key._spec.mesh.call(objects.backward, alike, ran, *given, key=("backward", shapes))
        return None, None, None, None, None, *found
