"""Count the collectives that this process has issued.

Ranks load this module, so it imports only the standard library.
"""

from __future__ import annotations

import sys
from typing import Any


def issued() -> int | None:
    """Return how many collectives the default group of torch.distributed has issued here; None if unknown."""
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_initialized():
            return None
        return int(distributed.group.WORLD._get_sequence_number_for_group())
    except Exception:  # some builds and backends do not count
        return None


def issued_by_all() -> int | None:
    """Return how many collectives all process groups together have issued here; None if unknown."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if c10d is None or not c10d.is_initialized():
            return None
        return sum(int(group._get_sequence_number_for_group()) for group in list(c10d._world.pg_map))
    except Exception:  # as above; also, groups come and go
        return issued()
