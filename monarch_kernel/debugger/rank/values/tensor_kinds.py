"""Split special tensors into the plain strided tensors that they consist of.

These are sharded, sparse, quantized, nested and wrapped tensors, and those without data. No function here starts or
waits for a collective: of a sharded tensor, only this rank's shard is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from monarch_kernel.debugger.rank.values.tensors import facts_of


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor: a plain tensor, or a description only.

    Attributes:
        path: the path from the tensor to the part.
        tensor: the strided, detached tensor; None if there is only `text`.
        facts: the facts that must be equal on all ranks; "" for the facts of the tensor itself.
        text: the text shown with it; for a piece without a tensor, its description.
        part: the shard of a sharded tensor.
        nested: whether the piece has to be taken apart in turn.
        unread: whether `text` describes why it cannot be read.
    """

    path: str
    tensor: torch.Tensor | None = None
    facts: str = ""
    text: str = ""
    part: str = ""
    nested: bool = False
    unread: bool = False


def pieces_of(value: torch.Tensor) -> list[Piece]:
    """Return the plain tensors that `value` consists of; usually only itself."""
    if torch.nn.parameter.is_lazy(value):
        return [Piece("", text=f"{type(value).__name__}, not initialized yet")]
    kinds = {base.__name__ for base in type(value).__mro__}
    if "AsyncCollectiveTensor" in kinds:
        return [Piece("", text="the result of a collective that has not been waited for yet", unread=True)]
    if "DTensor" in kinds or (hasattr(value, "to_local") and hasattr(value, "placements")):
        return _sharded(value)
    if value.is_meta or "FakeTensor" in kinds:
        return [Piece("", text=f"{facts_of(value, value.requires_grad)}, no data")]
    if hasattr(value, "__tensor_flatten__"):
        return _wrapped(value)
    if value.is_nested:
        inner = value.detach().unbind()
        return [
            _words("nested", value),
            *(Piece(f".unbind()[{at}]", each, nested=True) for at, each in enumerate(inner)),
        ]
    if value.layout is not torch.strided:
        return _sparse(value)
    if value.is_quantized:
        return _quantized(value)
    plain = value.detach()
    return [Piece("", plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor))]


def _words(kind: str, value: torch.Tensor, more: str = "") -> Piece:
    text = f"{kind} {str(value.dtype).removeprefix('torch.')}"
    text += "" if value.is_nested else f" {list(value.shape)}"
    return Piece(" (kind)", text=f"{text}{more}{', needs grad' if value.requires_grad else ''}")


def _sharded(value: Any) -> list[Piece]:
    local: torch.Tensor = value.to_local()
    place: Any = value.device_mesh.get_coordinate()
    parts = [
        f"{placement}" if place is None else f"{placement} {place[at]} of {value.device_mesh.size(at)}"
        for at, placement in enumerate(value.placements)
        if not placement.is_replicate()
    ]
    placements = ", ".join(map(str, value.placements))
    facts = f"{facts_of(value, value.requires_grad)}, {type(value).__name__}({placements})"
    if "AsyncCollectiveTensor" in {base.__name__ for base in type(local).__mro__}:
        return [Piece("", text=f"{facts}, the result of a collective that has not been waited for yet", unread=True)]
    note = f"local {list(local.shape)}" if local.shape != value.shape else ""
    return [Piece("", local.detach(), facts, note, ", ".join(parts))]


def _wrapped(value: Any) -> list[Piece]:
    """Split a Python tensor class that wraps other tensors and names them, by the protocol of `torch.compile`."""
    names, _context = value.__tensor_flatten__()
    inner = [Piece(f".{name}", getattr(value, name), nested=True) for name in names]
    return [_words(type(value).__name__, value), *inner]


def _sparse(value: torch.Tensor) -> list[Piece]:
    value, given = value.detach(), value
    kind = str(value.layout).removeprefix("torch.")
    if value.layout is torch.sparse_coo:
        value = value.coalesce()
        inner = {"indices": value.indices(), "values": value.values()}
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        inner = {name: getattr(value, name)() for name in ("crow_indices", "col_indices", "values")}
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        inner = {name: getattr(value, name)() for name in ("ccol_indices", "row_indices", "values")}
    else:
        return [Piece("", value.to_dense(), f"{facts_of(given, given.requires_grad)}, {kind}")]
    more = f", elements stored: {inner['values'].shape[0]:,}"
    return [_words(kind, given, more), *(Piece(f".{name}()", each) for name, each in inner.items())]


def _quantized(value: torch.Tensor) -> list[Piece]:
    facts = facts_of(value)
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        facts += f", scale {value.q_scale():g}, zero point {value.q_zero_point()}"
        return [Piece("", value.int_repr(), facts)]
    scales = [
        Piece(".q_per_channel_scales()", value.q_per_channel_scales()),
        Piece(".q_per_channel_zero_points()", value.q_per_channel_zero_points()),
    ]
    return [Piece("", value.int_repr(), facts), *scales]
