"""``remote_autograd_function``: a ``torch.autograd.Function`` that the ranks run, forward and backward."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.autograd.function import once_differentiable

from monarch_kernel.runtime.tensor.api.fetching import mesh_of_all
from monarch_kernel.runtime.tensor.api.learning import call_learnt
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.opaque_ref import OpaqueRef
from monarch_kernel.runtime.tensor.rank import objects


class RemoteAutogradFunction(torch.autograd.Function):
    """A function that ranks run with a forward and a backward of its own; `remote_autograd_function` makes them."""

    target_class: ClassVar[type[torch.autograd.Function]]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply it to tensors of a mesh, as the function that it was made of is applied to local ones."""
        learning = tuple(
            k
            for k, x in enumerate(args)
            if type(x) is Tensor and x.requires_grad and (x.is_floating_point() or x.is_complex())
        )
        return super().apply(cls, learning if torch.is_grad_enabled() else (), *args)

    @staticmethod
    def forward(ctx: Any, cls: Any, learning: tuple[int, ...], *args: Any) -> Any:  # type: ignore[override]  # see torch
        plain = [x.detach() if type(x) is Tensor else x for x in args]
        mesh = mesh_of_all(plain)
        target = cls.target_class
        function = objects.ApplyFunction(target)
        result, ran = call_learnt(mesh, function, (learning, *plain), {}, key=("autograd function", target))
        if learning:
            ctx.save_for_backward(ran.key)
        ctx.set_materialize_grads(False)
        ctx.learning, ctx.count = learning, len(args)
        ctx.shapes = tuple((tuple(args[k].shape), args[k].stride(), args[k].dtype) for k in learning)
        ctx.tensors = tuple(type(x) is Tensor for x in (result if type(result) is tuple else (result,)))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]  # see torch
        ran = OpaqueRef.of(ctx.saved_tensors[0])
        shapes = ctx.shapes

        def alike(*_: Any) -> list[torch.Tensor]:
            return [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in shapes]

        given = [None if g is None else g.detach() for g, is_tensor in zip(gradients, ctx.tensors) if is_tensor]
        found = ran.key._spec.mesh.call(objects.backward, alike, ran, *given, key=("backward", shapes))
        back: list[Any] = [None] * ctx.count
        for k, gradient in zip(ctx.learning, found):
            back[k] = gradient
        return None, None, *back


def remote_autograd_function(
    target_class: type[torch.autograd.Function], name: str | None = None
) -> type[RemoteAutogradFunction]:
    """Have the ranks run a ``torch.autograd.Function``: forward and backward are one operation each.

    ```python
    Square = remote_autograd_function(MySquare)
    y = Square.apply(x, 2.0)  # x is a tensor of a mesh
    y.sum().backward()
    ```

    Its context is the ranks': what it saves stays there, until the controller's graph goes. The first call with a
    kind of arguments waits for its result to learn the shapes. A second derivative is refused.

    Args:
        target_class: the function, which ranks can import, or of this program.
        name: of the class that is returned; by default ``Remote_`` and that of `target_class`.

    Raises:
        TypeError: it is no ``torch.autograd.Function``.
    """
    if not (isinstance(target_class, type) and issubclass(target_class, torch.autograd.Function)):
        raise TypeError(f"remote_autograd_function({target_class!r}): give a subclass of torch.autograd.Function")
    return type(name or f"Remote_{target_class.__name__}", (RemoteAutogradFunction,), {"target_class": target_class})
