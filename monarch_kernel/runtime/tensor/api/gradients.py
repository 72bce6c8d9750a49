"""``grad_generator`` and ``grad_function``: gradients one by one, and functions with gradients of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


def grad_generator(roots: Any, wrt: Sequence[torch.Tensor], grad_roots: Any = None) -> Generator[torch.Tensor | None]:
    """Gradients of `roots`, one for each tensor of `wrt` in turn; None for one that the roots do not depend on.

    The operations of the backward pass are issued at the first step; the ranks run them while the program goes on.

    Args:
        roots: a tensor, or several.
        wrt: what is differentiated by.
        grad_roots: gradients of the roots, where they are not single numbers.
    """
    outputs = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    given = [grad_roots] if isinstance(grad_roots, torch.Tensor) else grad_roots
    yield from torch.autograd.grad(outputs, list(wrt), given, allow_unused=True)


def grad_function(function: Callable[..., tuple[Any, Callable[..., Any]]]) -> Callable[..., Any]:
    """Make a function differentiable that returns its result and a function of the result's gradients.

    ```python
    @grad_function
    def double(x):
        return x * 2, lambda grad: grad * 2
    ```

    The second one gets a gradient for each tensor of the result, and returns one (or None) for each tensor among the
    arguments, in their order.
    """

    @functools.wraps(function)
    def differentiable(*args: Any, **kwargs: Any) -> Any:
        flat, tree = tree_flatten((args, kwargs))
        positions = [k for k, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        found: list[Any] = []

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: torch.Tensor) -> Any:
                for k, tensor in zip(positions, tensors):
                    flat[k] = tensor
                again, named = tree_unflatten(flat, tree)
                result, ctx.back = function(*again, **named)
                parts, shape = tree_flatten(result)
                found.append(shape)
                return tuple(parts)

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                back = ctx.back(*grads)
                return back if isinstance(back, tuple) else (back,)

        parts = Function.apply(*[flat[k] for k in positions])
        return tree_unflatten(list(parts), found[0])

    return differentiable
