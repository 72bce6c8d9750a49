"""Read from PyTorch's Flight Recorder when this rank entered its latest collectives."""

from __future__ import annotations

import socket
import sys
from typing import Any

from monarch_kernel.debugger.model.collective_times import CollectiveTimes
from monarch_kernel.debugger.rank.hang.collect import process_groups
from monarch_kernel.debugger.rank.hang.flight import SECOND, timed
from monarch_kernel.debugger.rank.rank_debugger import rank_of


def collective_times(depth: int) -> CollectiveTimes:
    """Return the latest collectives of this rank, with the times at which it called them.

    Args:
        depth: how many collectives of each process group.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    groups, _, dist_rank, world = process_groups(c10d) if c10d is not None else ({}, {}, -1, "")
    members = {name: group.ranks for name, group in groups.items()}
    calls = [
        call for name, found in (timed(depth) if groups else {}).items() for call in found if _base(name) in groups
    ]
    for call in calls:
        members.setdefault(call.group, members[_base(call.group)])
    calls.sort(key=lambda call: call.entered)
    return CollectiveTimes(rank_of()[1], dist_rank, world, _clock(), socket.gethostname(), members, tuple(calls))


def _base(group: str) -> str:
    return group.partition(SECOND)[0]


def _clock() -> str:
    """Return an id that is equal for all processes that share a system clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
