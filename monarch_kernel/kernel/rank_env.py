"""What `torch.distributed` needs on a rank: torchrun's environment variables, and a process group at will."""

from __future__ import annotations

import gc
import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from monarch_kernel.spmd import own_address

#: How long ranks wait for each other when they join (seconds).
JOIN_TIMEOUT = 60.0

_LOOPBACK = "127.0.0.1"

# Rank 0 keeps the port that it chose until its store takes over, so that nobody else can get it.
_reserved: dict[int, socket.socket] = {}


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet, and the backend of the process group to join (empty for none)."""

    address: str
    port: int
    backend: str


def reserve_port(backend: str, *, local: bool) -> Rendezvous:
    """Choose address and port for this process as rank 0.

    Args:
        backend: of the process group to come, or empty.
        local: all ranks are on this machine.
    """
    address = _LOOPBACK if local else own_address()
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind((address if local else "", 0))
    port = taken.getsockname()[1]
    if backend:
        taken.listen(1024)
        _reserved[port] = taken
    else:
        taken.close()  # the user's own init_process_group() will listen there
    return Rendezvous(address, port, backend)


def set_up(meet: Rendezvous, rank: int, world_size: int, local_size: int, threads: int) -> bool:
    """Set the variables that torchrun sets, and join the process group if `meet` names a backend.

    Args:
        meet: where.
        rank: of this process.
        world_size: how many ranks there are.
        local_size: how many of them on each host, in consecutive order.
        threads: for OpenMP and torch, unless the user's environment says otherwise.

    Returns:
        Whether a process group was made here.
    """
    local_rank = rank % local_size
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(local_size),
        GROUP_RANK=str(rank // local_size),
        GROUP_WORLD_SIZE=str(world_size // local_size),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(world_size),
        MASTER_ADDR=meet.address,
        MASTER_PORT=str(meet.port),
    )
    set_by_user = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch: Any = sys.modules.get("torch")
    if torch is not None and not set_by_user:
        torch.set_num_threads(threads)  # imported before the variable was set
    if not meet.backend:
        return False
    end_process_group()
    _join(meet, rank, world_size, local_rank)
    return True


def in_process_group() -> bool:
    """Whether this process is in a process group."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def end_process_group() -> None:
    """Leave the process group, if there is one."""
    if in_process_group():
        sys.modules["torch.distributed"].destroy_process_group()
        gc.collect()  # its connections are closed when the last work of it is gone


def cpu_ticks(thread: int) -> int:
    """Processor time of a thread of this process so far, in clock ticks; -1 where that is not known."""
    try:
        with open(f"/proc/self/task/{thread}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return -1


def _join(meet: Rendezvous, rank: int, world_size: int, local_rank: int) -> None:
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise RuntimeError(f"--dist needs torch, which the ranks cannot import ({error})") from None
    distributed: Any = torch.distributed  # which exports its stores without saying so
    if meet.backend == "nccl":
        if not torch.cuda.is_available():
            raise RuntimeError("--dist nccl needs a GPU, and torch finds none; use --dist gloo")
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    if meet.address == _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may not resolve
    listening = _reserved.pop(meet.port, None)
    store = distributed.TCPStore(
        meet.address,
        meet.port,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=JOIN_TIMEOUT),
        wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),
    )
    distributed.init_process_group(meet.backend, store=store, rank=rank, world_size=world_size)
