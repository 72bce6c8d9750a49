"""Tensors of actors and cells of this rank that the controller may adopt."""

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
    """What to return from an endpoint in place of a tensor that is to stay on its rank.

    The controller makes a handle of what all ranks of a mesh have offered: ``adopt(trainers.step.call().get())``. No
    data moves, and the memory is shared with the rank's own tensor. Gradients stay there.

    Args:
        tensor: a DTensor, or a tensor of the rank's own.

    Returns:
        What stands for it in messages. It keeps the tensor until it is adopted, or 1,024 others were offered.

    Raises:
        TypeError: it is no dense tensor.
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
    """A tensor that was offered, once.

    Raises:
        RuntimeError: it was adopted already, or forgotten.
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
    """Hold what this rank has offered as a value.

    Args:
        number: of the value.
        offers: the numbers of the offers, by rank.
    """
    worker = here()
    worker.store.values[number] = taken(offers[worker.rank])


def _layout_of(tensor: Any) -> OfferedLayout | None:
    if not hasattr(tensor, "placements"):
        return None
    mesh: Any = tensor.device_mesh
    return OfferedLayout(
        tuple(mesh.mesh.flatten().tolist()),
        tuple(mesh.shape),
        mesh.mesh_dim_names,
        tuple(tensor.placements),
        mesh.get_rank(),
    )
