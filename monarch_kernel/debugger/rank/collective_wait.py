"""Find the collective that this process waits in, and its timeout."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from monarch_kernel.thread_frames import current_frames

_COLLECTIVES = os.path.join("torch", "distributed", "")


def waiting_here() -> tuple[str, float] | None:
    """Return the collective that a thread of this process is in, and the shortest timeout of the groups (seconds)."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None or not module.is_initialized():
        return None
    for frame in current_frames().values():
        outermost = ""
        at = frame
        while at is not None and _COLLECTIVES in at.f_code.co_filename:
            name = at.f_code.co_name
            outermost = name if name != "wrapper" else outermost
            at = at.f_back
        if outermost:
            groups = list(module._world.pg_map)
            limits = [
                group._get_backend(device).options._timeout.total_seconds()
                for group in groups
                for device in group._device_types
            ]
            return (outermost, min(limits)) if limits else None
    return None


def partners_here() -> tuple[frozenset[int], float] | None:
    """Return the global ranks that share process groups with this process, and their shortest timeout (seconds)."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None or not module.is_initialized():
        return None
    shared = [group for group in list(module._world.pg_map) if group.size() > 1]
    partners = {rank for group in shared for rank in module.get_process_group_ranks(group)} - {module.get_rank()}
    limits = [
        group._get_backend(device).options._timeout.total_seconds()
        for group in shared
        for device in group._device_types
    ]
    return (frozenset(partners), min(limits)) if partners and limits else None


def extend_timeouts(seconds: float) -> tuple[int, list[str]]:
    """Raise the timeouts of this process's process groups to at least ``seconds``.

    This applies to collectives that begin from now on; a running collective keeps its timeout. Each rank decides on its
    own how long it waits.

    Returns:
        How many groups now have that timeout, and why others have not.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None or not module.is_initialized():
        return 0, []
    wanted = timedelta(seconds=seconds)
    done, refused = 0, list[str]()
    for group in list(module._world.pg_map):
        try:
            limits = [group._get_backend(device).options._timeout for device in group._device_types]
            if any(limit < wanted for limit in limits):
                module._set_pg_timeout(wanted, group)
            limits = [group._get_backend(device).options._timeout for device in group._device_types]
        except Exception as error:  # this backend, or this version of PyTorch, does not support it
            refused.append(f"{group.name()}: {type(error).__name__}: {error}")
            continue
        if limits and min(limits) >= wanted:
            done += 1
        else:
            refused.append(f"{group.name()}: its backend keeps {min(limits, default='its limit')}")
    return done, refused
