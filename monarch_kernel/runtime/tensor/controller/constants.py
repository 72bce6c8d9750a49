"""Values that the controller knows without asking: step counters of optimizers, and what is computed of them.

An optimizer reads its step at every parameter, which would be a round trip each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)
from torch.utils._pytree import tree_map

from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.signature import Signature
from monarch_kernel.runtime.tensor.wire.template import FloatSlot, TensorSlot

#: Operations on known numbers whose results are known, too.
FOLLOWED = frozenset(
    {
        "aten::add_.Tensor",
        "aten::add_.Scalar",
        "aten::add.Tensor",
        "aten::sub.Tensor",
        "aten::mul.Tensor",
        "aten::mul_.Tensor",
        "aten::clone.default",
        "aten::_to_copy.default",
    }
)


def follow(operation: Any, signature: Signature, ins: list[Tensor], floats: list[float], result: Any) -> None:
    """Compute here what an operation on known numbers gives on the ranks; forget what is written unknown."""
    if signature.label in FOLLOWED and all(a._constant is not None for a in ins):
        tensors, numbers = iter(ins), iter(floats)

        def fill(slot: Any) -> Any:
            if type(slot) is TensorSlot:
                return next(tensors)._constant
            return next(numbers) if type(slot) is FloatSlot else slot

        args, kwargs = tree_map(fill, signature.template)
        with _disable_current_modes(), torch.no_grad():
            out = operation(*args, **kwargs)
        if type(result) is Tensor:
            result._constant = out
        return
    for position in signature.mutates:
        ins[position]._constant = None
