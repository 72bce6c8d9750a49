"""The device of a rank: its GPU where it has one, else the CPU."""

from __future__ import annotations

import os
from functools import cache, wraps
from typing import Any

import torch

from monarch_kernel.runtime.tensor.rank.current_executor import runs_one


@cache
def of_rank() -> torch.device:
    """``cuda:LOCAL_RANK`` (modulo the devices that the process sees), or ``cpu``."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Operations are called without torch's Python binding, which would do this: a seed that was set before would
    # otherwise wait for it, and not count.
    torch.cuda.init()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local % torch.cuda.device_count())


@cache
def keep_device() -> None:
    """Have functions of the ranks that set another device than their rank's fail with what to do instead.

    Operations of the rank name its device: what the function makes would be on another. Other threads are free to.
    """
    plain = torch.cuda.set_device

    @wraps(plain)
    def set_device(device: Any) -> None:
        if runs_one():
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
