"""Compute gradients one at a time (``grad_generator``), and define functions with custom gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_kernel.runtime.tensor.api.activation import active_target, restored
from monarch_kernel.runtime.tensor.api.fetching import call_learnt, mesh_of_all
from monarch_kernel.runtime.tensor.api.opaque_object import backward_on_ranks
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.rank import objects


class GradientGenerator:
    """An iterator over gradients, created by `grad_generator`."""

    def __init__(self, roots: Sequence[Any], with_respect_to: Sequence[object], grad_roots: Sequence[Any] = ()) -> None:
        self._steps = self._run(roots, with_respect_to, grad_roots)

    def __iter__(self) -> GradientGenerator:
        return self

    def __next__(self) -> torch.Tensor | None:
        return next(self._steps)

    def _run(
        self, roots: Sequence[torch.Tensor], with_respect_to: Any, grad_roots: Sequence[torch.Tensor | None]
    ) -> Generator[torch.Tensor | None]:
        if not with_respect_to:
            return
        given = [*grad_roots, *[None] * (len(roots) - len(grad_roots))]
        for k, root in enumerate(roots):
            if given[k] is None and isinstance(root, torch.Tensor):
                given[k] = torch.ones_like(root)
        yield from torch.autograd.grad([*roots], [*with_respect_to], given, allow_unused=True)


def grad_generator(
    roots: Any = (), with_respect_to: Sequence[Any] = (), grad_roots: Sequence[torch.Tensor | None] = ()
) -> GradientGenerator:
    """Yield the gradient of `roots` for each tensor of `with_respect_to` in turn; None if they do not depend on it.

    The first step issues the operations of the backward pass. The ranks run them while the program continues.

    Args:
        roots: a tensor or ``GradientEdge``, or several.
        with_respect_to: tensors and ``GradientEdge`` objects to differentiate by.
        grad_roots: gradients of the roots; ones where a gradient is missing or None.
    """
    outputs = [roots] if isinstance(roots, (torch.Tensor, GradientEdge)) else roots
    given = [grad_roots] if isinstance(grad_roots, torch.Tensor) else grad_roots or ()
    return GradientGenerator(outputs, with_respect_to, given)


def gradient_execution_order(roots: Sequence[torch.Tensor], with_respect_to: Sequence[torch.Tensor]) -> list[int]:
    """Return the positions in `with_respect_to` in the order in which a backward pass computes their gradients.

    This is the reverse order of their first uses. Unused tensors come first.

    Args:
        roots, with_respect_to: tensors that require grad, or ``GradientEdge`` objects.
    """
    first_use: dict[tuple[Any, int], int] = {}
    found = {_edge_of(root).node for root in roots}
    left = list(found)
    while left:
        node = left.pop()
        for source, number in node.next_functions:
            if source is None:
                continue
            use = node._sequence_nr()
            first_use[source, number] = min(use, first_use.get((source, number), use))
            if source not in found:
                found.add(source)
                left.append(source)
    edges = [_edge_of(x) for x in with_respect_to]
    uses = [first_use.get((edge.node, edge.output_nr), math.inf) for edge in edges]
    return sorted(range(len(uses)), key=lambda k: -uses[k])


def _edge_of(x: object) -> Any:
    return get_gradient_edge(x) if isinstance(x, torch.Tensor) else x


def grad_function(function: Callable[..., tuple[object, Callable[..., object]]]) -> Callable[..., Any]:
    """Make a function differentiable that returns its result and a function of the gradients of the result.

    ```python
    @grad_function
    def double(x):
        return x * 2, lambda grad: grad * 2
    ```

    The gradient function takes a gradient for each part of the result. It returns a gradient (or None) for each tensor
    among the arguments, in their order, or for each argument. It runs with the mesh and the stream of the result
    active. Arguments and results may be nested lists, tuples and dicts.
    """

    @functools.wraps(function)
    def differentiable(*args: object, **kwargs: object) -> object:
        flat, tree = tree_flatten((args, kwargs))
        positions = [k for k, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        found: list[Any] = []

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: torch.Tensor) -> Any:
                for k, tensor in zip(positions, tensors):
                    flat[k] = tensor
                again, named = tree_unflatten(flat, tree)
                made = function(*again, **named)
                if not (type(made) is tuple and len(made) == 2 and callable(made[1])):
                    name = getattr(function, "__name__", function)
                    raise TypeError(f"grad_function: {name} gave no pair of a result and a function of its gradients")
                result, ctx.back = made
                parts, shape = tree_flatten(result)
                found.append(shape)
                there = next((x._spec.mesh for x in parts if type(x) is Tensor), None)
                ctx.target = active_target() if there is None or there.sharded else (there.procs, there.stream)
                return tuple(parts)

            @staticmethod
            def backward(ctx: Any, *grads: object) -> Any:
                with restored(*ctx.target):
                    back = tree_flatten(ctx.back(*grads), is_leaf=lambda x: x is None)[0]
                if len(back) == len(flat) and len(flat) != len(positions):
                    back = [back[k] for k in positions]
                return tuple(back)

        parts = Function.apply(*[flat[k] for k in positions])
        return tree_unflatten(list(parts), found[0])

    return differentiable


class RemoteAutogradFunction(torch.autograd.Function):
    """A function with custom forward and backward on the ranks, created by `remote_autograd_function`."""

    target_class: ClassVar[type[torch.autograd.Function]]

    @classmethod
    def apply(cls, *args: object) -> Any:
        """Apply the function to tensors of a mesh, like ``torch.autograd.Function.apply``."""
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
        given = [g for g, is_tensor in zip(gradients, ctx.tensors) if is_tensor]
        found = backward_on_ranks(ctx, given)
        back: list[Any] = [None] * ctx.count
        for k, gradient in zip(ctx.learning, found):
            back[k] = gradient
        return None, None, *back


def remote_autograd_function(
    target_class: type[torch.autograd.Function], name: str | None = None
) -> type[RemoteAutogradFunction]:
    """Run a ``torch.autograd.Function`` on the ranks. Its forward and backward are one operation each.

    ```python
    Square = remote_autograd_function(MySquare)
    y = Square.apply(x, 2.0)  # x is a tensor of a mesh
    y.sum().backward()
    ```

    The context lives on the ranks: saved values stay there until the controller frees the graph. The first call with a
    kind of arguments waits for its result to learn the shapes. Second derivatives raise an error.

    Args:
        target_class: the class, which ranks can import or this program defines.
        name: the name of the returned class; by default ``Remote_`` and the name of `target_class`.

    Raises:
        TypeError: `target_class` is not a ``torch.autograd.Function``.
    """
    if not (isinstance(target_class, type) and issubclass(target_class, torch.autograd.Function)):
        raise TypeError(f"remote_autograd_function({target_class!r}): give a subclass of torch.autograd.Function")
    return type(name or f"Remote_{target_class.__name__}", (RemoteAutogradFunction,), {"target_class": target_class})
