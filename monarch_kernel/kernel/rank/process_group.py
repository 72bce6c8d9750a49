"""Set up `torch.distributed` on a rank: the environment of torchrun, and a process group if requested."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from monarch_kernel.spmd import Meeting, are_broken, count_meetings, join, leave, reserve, set_environment


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address where ranks rendezvous, and the backend of their process group ("" for none)."""

    meeting: Meeting
    backend: str


def choose_rendezvous(backend: str, world_size: int, local_size: int, *, local: bool) -> Rendezvous:
    """Choose a rendezvous, on rank 0.

    Args:
        backend: the backend of the process group. If it is "", `init_process_group()` in user code will listen there.
        world_size: the number of ranks.
        local_size: the number of consecutive ranks on each host.
        local: whether all ranks are on this machine.
    """
    return Rendezvous(reserve(world_size, local_size, local=local, serve=bool(backend)), backend)


def set_up(meet: Rendezvous, rank: int, threads: int) -> bool:
    """Set the variables that torchrun sets, and join the process group if `meet` names a backend.

    Args:
        meet: the rendezvous.
        rank: the rank of this process.
        threads: the number of OpenMP and torch threads, unless the environment sets it.

    Returns:
        Whether a process group was created.
    """
    set_environment(meet.meeting, rank)
    count_meetings(meet.meeting)
    set_by_user = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch: Any = sys.modules.get("torch")
    if torch is not None and not set_by_user:
        torch.set_num_threads(threads)  # torch was imported before the variable was set
    if not meet.backend:
        if are_broken():  # an unusable group created by user code
            leave()
        return False
    if meet.backend == "nccl":
        _choose_gpu(rank % meet.meeting.local_size)
    join(meet.meeting, rank, meet.backend)
    if meet.backend == "nccl":
        _refuse_shared_gpus(rank, meet.meeting.world_size)
    return True


def _choose_gpu(local_rank: int) -> None:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("--dist nccl needs a GPU, and torch finds none; use --dist gloo")
    torch.cuda.set_device(local_rank % torch.cuda.device_count())


def _refuse_shared_gpus(rank: int, world_size: int) -> None:
    """Leave the group and raise on all ranks if two ranks use one GPU; NCCL would fail in their first collective."""
    import torch
    import torch.distributed

    store: Any = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"gpu {rank}", str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
    ranks_of: dict[bytes, list[int]] = {}
    for other, gpu in enumerate(store.multi_get([f"gpu {other}" for other in range(world_size)])):
        ranks_of.setdefault(gpu, []).append(other)
    shared = next((ranks for ranks in ranks_of.values() if len(ranks) > 1), None)
    if shared is not None:
        leave()
        raise RuntimeError(
            f"ranks {', '.join(map(str, shared))} use the same GPU, which NCCL refuses: use --dist gloo, or bring up "
            "at most as many ranks on a host as it has GPUs"
        )


def end_process_group() -> None:
    """Leave the process group, if there is one."""
    leave()


def cpu_ticks(thread: int) -> int:
    """Return the CPU time that a thread of this process has used, in clock ticks; -1 if unknown."""
    try:
        with open(f"/proc/self/task/{thread}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return -1
