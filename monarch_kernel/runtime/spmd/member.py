"""One rank's side of process groups: where the ranks meet, joining, and getting away from one that lost a rank.

Gloo tells only those of a failed rank that are just then talking to it. The others wait for their neighbours, who will
never come, until the group's timeout (half an hour by default), and there is no call that ends such a wait. So a rank
remembers which connections its group opened. ``abandon`` shuts them down, from another thread: then every collective
that is under way ends in an error, here and at whoever waits for this rank.

Nearly every: when gloo sends on a connection in the very moment in which its end is noticed, it forgets to tell the
sender. Therefore ``abandon`` also says whether the threads that were in torch then have come out of it.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a mesh meet, and who they are."""

    address: str
    port: int
    world_size: int
    local_size: int


class _Member:
    """The process group of this process, as far as this module made it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.before: frozenset[int] | None = None  # inodes of the sockets that were there before the group
        self.own: frozenset[int] | None = None  # of those that it opened; None while it is being made
        # Rank 0 keeps the port that it chose until its store takes over, so that nobody else can get it.
        self.reserved: dict[int, socket.socket] = {}


_member = _Member()


def reserve(world_size: int, local_size: int, *, local: bool, keep: bool = True) -> Meeting:
    """Choose, as rank 0, where the ranks meet.

    Args:
        local: all ranks are on this machine, so that nobody else need reach the port.
        keep: hold the port for ``join``; otherwise it is left free for who listens there next.
    """
    address = LOOPBACK if local else own_address()
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind((address if local else "", 0))
    port = taken.getsockname()[1]
    if keep:
        taken.listen(1024)
        with _member.lock:
            for unused in _member.reserved.values():  # of a group that never came about
                unused.close()
            _member.reserved = {port: taken}
    else:
        taken.close()
    return Meeting(address, port, world_size, local_size)


def set_environment(meeting: Meeting, rank: int) -> None:
    """Set the variables that torchrun sets."""
    local = meeting.local_size
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % local),
        WORLD_SIZE=str(meeting.world_size),
        LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local),
        GROUP_WORLD_SIZE=str(meeting.world_size // local),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(meeting.world_size),
        MASTER_ADDR=meeting.address,
        MASTER_PORT=str(meeting.port),
    )


def join(meeting: Meeting, rank: int, backend: str, join_timeout: float, timeout: float | None, **options: Any) -> None:
    """Leave the process group that there is, and be this rank of a new one, which is torch's default group then.

    Args:
        join_timeout: how long ranks wait for each other here (seconds).
        timeout: of collectives (seconds); None leaves torch's.
        options: for ``torch.distributed.init_process_group``.
    """
    try:
        import torch.distributed
    except ImportError as e:
        raise RuntimeError(f"a process group needs torch, which rank {rank} cannot import ({e})") from None
    distributed: Any = torch.distributed  # which exports its stores without saying so
    leave()
    set_environment(meeting, rank)
    if meeting.address == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may not resolve
    with _member.lock:
        listening = _member.reserved.pop(meeting.port, None)
        _member.own = None
        _member.before = _sockets() - {_inode(listening)}
    store = distributed.TCPStore(
        meeting.address,
        meeting.port,
        meeting.world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=join_timeout),
        wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),
    )
    if timeout is not None:
        options["timeout"] = timedelta(seconds=timeout)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=meeting.world_size, **options)
    with _member.lock:
        _member.own = _sockets() - _member.before


def leave() -> None:
    """Leave the default process group, if there is one."""
    with _member.lock:
        _member.before = _member.own = None
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()  # its connections are closed when the last work of it is gone


def abandon(patience: float = 0.0) -> bool:
    """End every collective of the group that ``join`` made, or is making, in an error. From any thread.

    The group itself is as good as dead then; ``join`` or ``leave`` clears it away.

    Args:
        patience: how long threads that are in torch may take to come out of it (seconds).

    Returns:
        Whether they have, or there was no group.
    """
    with _member.lock:
        if _member.before is None:
            return True
        inodes = _member.own if _member.own is not None else _sockets() - _member.before
        for inode in inodes:
            _shut_down(inode)
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized() and distributed.get_backend() != "gloo":
        abort = getattr(distributed.group.WORLD, "abort", None)  # of NCCL, which knows how to
        if abort is not None:
            abort()
    inside = {thread: frame for thread, top in sys._current_frames().items() if (frame := _in_torch(top)) is not None}
    deadline = time.monotonic() + patience
    while inside:
        tops = sys._current_frames()
        inside = {thread: frame for thread, frame in inside.items() if frame in _stack(tops.get(thread))}
        if inside and time.monotonic() >= deadline:
            return False
        time.sleep(0.001 if inside else 0)
    return True


def _stack(top: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while top is not None:
        frames.append(top)
        top = top.f_back
    return frames


def _in_torch(top: FrameType) -> FrameType | None:
    """The outermost frame of a thread that runs code of torch's in which collectives happen."""
    parts = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}torch{os.sep}autograd{os.sep}")
    return next((f for f in reversed(_stack(top)) if any(part in f.f_code.co_filename for part in parts)), None)


def own_address() -> str:
    """The address that other hosts reach this one at."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = LOOPBACK
    if not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: this only chooses the route
            return str(probe.getsockname()[0])
        except OSError:
            return name


# -- this process's sockets -------------------------------------------------------------------------


def _descriptors() -> dict[int, int]:
    """The descriptors of all sockets of this process, by inode."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _sockets() -> frozenset[int]:
    return frozenset(_descriptors())


def _inode(held: socket.socket | None) -> int:
    return -1 if held is None else os.fstat(held.fileno()).st_ino


def _shut_down(inode: int) -> None:
    """End a connection over the network as if its peer had; whatever else has that inode is left alone."""
    fd = _descriptors().get(inode)
    if fd is None:
        return
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as held:
        # Closed and opened again as something else before it was duplicated?
        if _inode(held) != inode or held.family not in (socket.AF_INET, socket.AF_INET6):
            return
        # A listener that ends would be an error of its own to who accepts there.
        if not held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            held.shutdown(socket.SHUT_RD)
