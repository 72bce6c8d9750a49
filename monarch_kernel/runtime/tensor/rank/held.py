"""`held_here`: the memory of the values that a rank holds for a controller."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from monarch_kernel.runtime.tensor.rank.current_worker import here


class HeldValue(NamedTuple):
    """A value on a rank.

    Attributes:
        number: of the value.
        storage: tells its memory from that of others; views share one.
        nbytes: of that memory.
        device: where it is.
    """

    number: int
    storage: int
    nbytes: int
    device: str


def held_here() -> list[HeldValue]:
    """The tensors that this rank holds; no element is read."""
    found: list[HeldValue] = []
    for number, value in sorted(here().store.values.items()):
        local: Any = getattr(value, "_local_tensor", value)
        local = getattr(local, "elem", local)
        if isinstance(local, torch.Tensor):
            storage = local.untyped_storage()
            found.append(HeldValue(number, storage._cdata, storage.nbytes(), str(local.device)))
    return found
