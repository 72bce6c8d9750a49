"""Offer tensors of actors and cells of this rank to the controller, which may adopt them."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch

from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.rank.values import LENT
from monarch_kernel.runtime.tensor.wire import OfferedLayout, OfferedTensor

_numbers = itertools.count(1)
_offered: dict[int, torch.Tensor] = {}
_lock = threading.Lock()


def offer(tensor: torch.Tensor) -> OfferedTensor:
    """Offer a tensor: an endpoint returns the result of this call, and the tensor stays on its rank.

    The controller creates a handle of the offers of all ranks of a mesh: ``adopt(trainers.step.call().get())``. No data
    moves, and the handle shares memory with the rank's own tensor. Gradients do not pass.

    Args:
        tensor: a DTensor, or a separate tensor of the rank.

    Returns:
        The offer, which represents the tensor in messages. The tensor is kept until it is adopted, or until 1,024
            others were offered.

    Raises:
        TypeError: the argument is not a dense tensor.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        kind = str(tensor.layout) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"offer({kind}): only dense tensors and DTensors can be offered to the controller")
    layout = _layout_of(tensor)
    with _lock:
        number = next(_numbers)
        _offered[number] = tensor.detach()
        if len(_offered) > LENT:
            del _offered[next(iter(_offered))]
    return OfferedTensor(
        get_system().node.id, number, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, layout
    )


def taken(number: int) -> Any:
    """Take an offered tensor. Each can be taken once.

    Raises:
        RuntimeError: the tensor was already adopted, or its offer has expired.
    """
    with _lock:
        tensor = _offered.pop(number, None)
    if tensor is None:
        raise RuntimeError(
            f"a tensor that was offered is gone: it was adopted already, or {LENT:,} others were offered after it. "
            "Offer it again"
        )
    return tensor


def adopted(number: int, offers: dict[int, int]) -> None:
    """Store this rank's offer as a value.

    Args:
        number: the number of the value.
        offers: the numbers of the offers, by rank.
    """
    worker = here()
    worker.store.values[number] = taken(offers[worker.rank])


def _layout_of(tensor: Any) -> OfferedLayout | None:
    if not hasattr(tensor, "placements"):
        return None
    mesh = tensor.device_mesh
    return OfferedLayout(
        tuple(mesh.mesh.flatten().tolist()),
        tuple(mesh.shape),
        mesh.mesh_dim_names,
        tuple(tensor.placements),
        mesh.get_rank(),
    )
