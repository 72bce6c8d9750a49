"""Tensors on their way to the controller: small ones packed, and digests by which those of ranks are compared.

Torch's own pickling writes an archive for each tensor, which takes 0.2 ms.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

#: Larger ones go out of band (bytes).
SMALL = 16 << 10
#: A digest reads at most this many elements.
_SAMPLED = 1 << 16


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


def digest(tensor: torch.Tensor) -> int:
    """A number that differs where the bytes differ; of a large tensor, those of elements at even distances.

    0 for sparse and quantized tensors, which are not compared.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        return 0
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLED)].cpu().contiguous()
    return zlib.crc32(sample.view(torch.uint8).numpy().data) if sample.numel() else 0
