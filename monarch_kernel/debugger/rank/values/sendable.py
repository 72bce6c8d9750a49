"""Values as they can be sent: with their tensors on the CPU."""

from __future__ import annotations

import copy
import sys
from typing import Any


def sendable(value: Any) -> Any:
    """`value` with its tensors on the CPU, as the receiver may have no such device.

    Only what is on a device is copied. Tensors that need a gradient are sent without their graph.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach() if value.is_meta else value.detach().cpu()
    kind = type(value)
    if kind is dict:
        return {key: sendable(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(sendable(item) for item in value)
    if isinstance(value, torch.nn.Module):
        held = (*value.parameters(), *value.buffers())
        return value if all(tensor.device.type in ("cpu", "meta") for tensor in held) else on_cpu(value)
    return value


def on_cpu(module: Any) -> Any:
    """A copy of a module whose parameters and buffers are on the CPU."""
    # A deep copy does not copy what it finds in its memo, so the device gets no second module.
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        moved = tensor.detach().cpu()
        memo[id(tensor)] = type(tensor)(moved, tensor.requires_grad) if _is_parameter(tensor) else moved
    return copy.deepcopy(module, memo)


def _is_parameter(tensor: Any) -> bool:
    torch: Any = sys.modules["torch"]
    return type(tensor) is torch.nn.Parameter
