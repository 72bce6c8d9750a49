"""Small tensors on their way to the controller: torch's own pickling writes an archive for each, which takes 0.2 ms."""

from __future__ import annotations

from typing import Any

import torch

#: Larger ones go out of band (bytes).
SMALL = 16 << 10


class PackedTensor:
    """In the place of a small tensor in an answer; arrives as a contiguous tensor."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self._tensor
        return unpacked, (tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), tensor.dtype, tensor.shape)


def packed(tensor: torch.Tensor) -> Any:
    """The tensor as it is sent: itself, if it is large or of a special kind."""
    if (
        tensor.numel() * tensor.element_size() >= SMALL
        or type(tensor) is not torch.Tensor
        or tensor.device.type != "cpu"
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return tensor
    return PackedTensor(tensor)


def unpacked(raw: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """The tensor, with memory of its own."""
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)
