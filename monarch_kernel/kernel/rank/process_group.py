"""What `torch.distributed` needs on a rank: torchrun's environment variables, and a process group at will."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from monarch_kernel.spmd import Meeting, are_broken, count_meetings, join, leave, reserve, set_environment


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet, and the backend of the process group to join (empty for none)."""

    meeting: Meeting
    backend: str


def choose_rendezvous(backend: str, world_size: int, local_size: int, *, local: bool) -> Rendezvous:
    """Choose, as rank 0, where the ranks meet.

    Args:
        backend: of the process group to come, or empty: then the user's own `init_process_group()` will listen there.
        world_size: how many ranks there are.
        local_size: how many of them on each host, in consecutive order.
        local: all ranks are on this machine.
    """
    return Rendezvous(reserve(world_size, local_size, local=local, serve=bool(backend)), backend)


def set_up(meet: Rendezvous, rank: int, threads: int) -> bool:
    """Set the variables that torchrun sets, and join the process group if `meet` names a backend.

    Args:
        meet: where.
        rank: of this process.
        threads: for OpenMP and torch, unless the user's environment says otherwise.

    Returns:
        Whether a process group was made here.
    """
    set_environment(meet.meeting, rank)
    count_meetings(meet.meeting)
    set_by_user = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch: Any = sys.modules.get("torch")
    if torch is not None and not set_by_user:
        torch.set_num_threads(threads)  # imported before the variable was set
    if not meet.backend:
        if are_broken():  # one that the user has made, and that cannot be used any more
            leave()
        return False
    if meet.backend == "nccl":
        _choose_gpu(rank % meet.meeting.local_size)
    join(meet.meeting, rank, meet.backend)
    return True


def _choose_gpu(local_rank: int) -> None:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("--dist nccl needs a GPU, and torch finds none; use --dist gloo")
    torch.cuda.set_device(local_rank % torch.cuda.device_count())


def end_process_group() -> None:
    """Leave the process group, if there is one."""
    leave()


def cpu_ticks(thread: int) -> int:
    """Processor time of a thread of this process so far, in clock ticks; -1 where that is not known."""
    try:
        with open(f"/proc/self/task/{thread}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return -1
