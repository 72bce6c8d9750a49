"""The device of a rank: its GPU where it has one, else the CPU."""

from __future__ import annotations

import os
from functools import cache

import torch


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
