"""The device of a rank: its GPU if it has one, otherwise the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch


@cache
def of_rank() -> torch.device:
    """Return ``cuda:LOCAL_RANK`` (modulo the number of visible devices), or ``cpu``."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Operations bypass torch's Python binding, which would initialise CUDA. Without this, an earlier seed would stay
    # pending and have no effect.
    torch.cuda.init()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local % torch.cuda.device_count())


@cache
def keep_device(is_function_of_ranks: Callable[[], bool]) -> None:
    """Make functions of the ranks fail with an explanation if they select a device other than their rank's.

    Operations name the rank's device, but the function would create tensors on another. Other threads are not
    restricted.
    """
    plain = torch.cuda.set_device

    @wraps(plain)
    def set_device(device: Any) -> None:
        if is_function_of_ranks():
            mine = of_rank()
            wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            if mine.type != "cuda" or wanted.index not in (None, mine.index):
                raise ValueError(
                    f"torch.cuda.set_device({device}) in a function of the ranks: this rank computes on {mine}, and on "
                    "nothing else. Leave the call away; which devices a process sees is said when it is spawned "
                    "(CUDA_VISIBLE_DEVICES in its environment)"
                )
        plain(device)

    torch.cuda.set_device = set_device
