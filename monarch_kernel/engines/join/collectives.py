"""How many collectives this process has issued. It imports the standard library only: ranks load it."""

from __future__ import annotations

import sys
from typing import Any


def issued() -> int | None:
    """How many collectives the default group of torch.distributed has issued here; None if that is not known."""
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_initialized():
            return None
        return int(distributed.group.WORLD._get_sequence_number_for_group())
    except Exception:  # not every build has it, and not every backend counts
        return None


def issued_by_all() -> int | None:
    """How many all its process groups have issued here, together; None if that is not known."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if c10d is None or not c10d.is_initialized():
            return None
        return sum(int(group._get_sequence_number_for_group()) for group in list(c10d._world.pg_map))
    except Exception:  # as above, and groups come and go
        return issued()
