"""One rank's side of process groups: where the ranks meet, joining, and getting away from one that lost a rank.

Gloo tells only those of a failed rank that are just then talking to it. The others wait for their neighbours, who will
never come, until the group's timeout (half an hour by default), and there is no call that ends such a wait. So a rank
remembers which connections its group opened (``runtime.actor.collectives``). ``abandon`` ends them, from another
thread: then every collective that is under way ends in an error, here and at whoever waits for this rank.

Nearly every: when gloo sends on a connection in the very moment in which its end is noticed, it forgets to tell the
sender. Therefore ``abandon`` also says whether the threads that were in torch then have come out of it.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

from monarch_kernel.runtime.actor.execution.collectives import Opened, opening
from monarch_kernel.runtime.actor.execution.postmortem import let_go_of_groups
from monarch_kernel.runtime.spmd.host_address import LOOPBACK, choose_interface, own_address

#: How long a rank may take to reach rank 0's store, which is there before anybody is told of it (seconds).
CONNECT_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a mesh meet, and who they are."""

    address: str
    port: int
    world_size: int
    local_size: int
    store_port: int = 0  # for programs that run in the ranks and make groups of their own


class _Member:
    """The process group of this process, as far as this module made it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.opened: Opened | None = None  # its connections
        self.given_up: dict[str, int] = {}  # the last group of each series that must not be joined any more
        # Where the ranks find each other, at rank 0: of the next group, and of the one before it for latecomers.
        self.stores: deque[Any] = deque(maxlen=2)


_member = _Member()


def reserve(world_size: int, local_size: int, *, local: bool, serve: bool = True) -> Meeting:
    """Choose, as rank 0, where the ranks meet.

    Args:
        local: all ranks are on this machine, so that nobody else need reach the port.
        serve: have the store there at once, for ``join``; otherwise the port is left free for who listens there next.
    """
    address = LOOPBACK if local else own_address()
    with socket.socket(socket.AF_INET) as taken, socket.socket(socket.AF_INET) as other:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((address if local else "", 0))
        other.bind((address if local else "", 0))
        meeting = Meeting(address, taken.getsockname()[1], world_size, local_size, other.getsockname()[1])
        if serve:
            taken.listen(1024)
            _member.stores.append(_store(meeting, master_listen_fd=taken.detach()))
    return meeting


def _store(meeting: Meeting, **options: Any) -> Any:
    """A connection to the ranks' store; with a listening socket, the store itself."""
    distributed = _distributed()
    return distributed.TCPStore(
        meeting.address,
        meeting.port,
        meeting.world_size,
        is_master="master_listen_fd" in options,
        timeout=timedelta(seconds=CONNECT_TIMEOUT),
        wait_for_workers=False,
        **options,
    )


def _distributed() -> Any:
    try:
        import torch.distributed
    except ImportError as e:
        raise RuntimeError(f"a process group needs torch, which this rank cannot import ({e})") from None
    return torch.distributed


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


def join(
    meeting: Meeting,
    rank: int,
    backend: str,
    number: tuple[str, int] = ("", 1),
    join_timeout: float = 60.0,
    timeout: float | None = None,
    **options: Any,
) -> None:
    """Leave the process group that there is, and be this rank of a new one, which is torch's default group then.

    Args:
        number: of this group in a series of groups that has this name.
        join_timeout: how long ranks wait for each other here (seconds).
        timeout: of collectives (seconds); None leaves torch's.
        options: for ``torch.distributed.init_process_group``.
    """
    distributed = _distributed()
    leave()
    set_environment(meeting, rank)
    series, which = number
    if backend == "gloo":
        choose_interface(LOOPBACK if meeting.address == LOOPBACK else own_address())
    with opening() as opened:
        store = _store(meeting)
        store.set_timeout(timedelta(seconds=join_timeout))
        with _member.lock:
            if which <= _member.given_up.get(series, 0):
                raise RuntimeError(
                    f"process group {which} was given up before rank {rank} joined it: join the next one"
                )
            # Who gives the group up from here on breaks that connection.
            _member.opened = opened
        try:
            if timeout is not None:
                options["timeout"] = timedelta(seconds=timeout)
            # torch names groups by this count, and one that could not be made leaves it raised: then this rank would
            # look for the others under another name than a rank that is new.
            distributed.distributed_c10d._world.group_count = 0
            distributed.init_process_group(backend, store=store, rank=rank, world_size=meeting.world_size, **options)
        except BaseException:
            with _member.lock:
                _member.opened = None
            raise


def leave() -> None:
    """Leave the default process group, if there is one."""
    with _member.lock:
        _member.opened = None
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        let_go_of_groups()
        gc.collect()  # its connections are closed when the last work of it is gone


def abandon(number: tuple[str, int] = ("", 0), patience: float = 0.0) -> bool:
    """End every collective of the group that ``join`` made, or is making, in an error. From any thread.

    The group itself is as good as dead then; ``join`` or ``leave`` clears it away.

    Args:
        number: this group and those before it in the series must not be joined from now on.
        patience: how long threads that are in torch may take to come out of it (seconds).

    Returns:
        Whether they have.
    """
    series, which = number
    with _member.lock:
        _member.given_up[series] = max(which, _member.given_up.get(series, 0))
    _break_connections()
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
        if inside:
            time.sleep(0.001)
            _break_connections()  # those that a join under way has opened since
    return True


def _break_connections() -> None:
    with _member.lock:
        if _member.opened is not None:
            _member.opened.shut_down()


def _stack(top: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while top is not None:
        frames.append(top)
        top = top.f_back
    return frames


def _in_torch(top: FrameType) -> FrameType | None:
    """The outermost frame of a thread that joins a group, or runs code of torch's in which collectives happen."""
    parts = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}torch{os.sep}autograd{os.sep}")
    for frame in reversed(_stack(top)):
        if frame.f_code is join.__code__ or any(part in frame.f_code.co_filename for part in parts):
            return frame
    return None
