"""One rank's part in process groups: the address where the ranks meet, joining a group, and leaving a broken one.

When a rank fails, gloo notifies only the ranks that are communicating with it. The others wait for their neighbours
until the group's timeout (half an hour by default), and no call ends such a wait. So a rank records which connections
its group opened (``execution.collectives``). ``abandon`` shuts them down from another thread: then every running
collective fails, here and on the ranks that wait for this rank.

There is one exception: if a connection ends in the middle of a message, gloo drops the message and does not notify the
thread that waits for it. Therefore all ranks ``settle`` first, and ``abandon`` also reports whether the threads that
were in torch have returned from it.
"""

from __future__ import annotations

import gc
import ipaddress
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

from monarch_kernel.runtime.actor.execution.collectives import Opened, opening, shut_down_all
from monarch_kernel.runtime.actor.execution.postmortem import let_go_of_groups
from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.thread_frames import current_frames

# Find the address at which other hosts reach this host, and its network interface.

LOOPBACK = "127.0.0.1"
#: The environment variable that names gloo's network interface.
GLOO = "GLOO_SOCKET_IFNAME"

_chosen = ""


def own_address() -> str:
    """Return the address at which other hosts reach this host.

    On the host of a worker that listens on TCP, it is the address in the worker's URL; otherwise the address of this
    host's name; otherwise the address of the interface of the default route. The result is a name if only other hosts
    can resolve it.
    """
    advertised = _advertised()
    if advertised:
        address = _resolved(advertised)
        return advertised if address.startswith("127.") else address or advertised
    address = _resolved(socket.gethostname())
    if address and not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; only selects a route
            return str(probe.getsockname()[0])
        except OSError:
            return address or LOOPBACK


def choose_interface(address: str) -> None:
    """Make gloo use the interface that has this address, unless the user has chosen an interface.

    By default gloo resolves the host's name, and silently uses the loopback interface if that fails.

    Args:
        address: the result of ``own_address``, or the loopback address.
    """
    global _chosen
    if os.environ.get(GLOO, _chosen) != _chosen:
        return
    _chosen = _interface_of(_resolved(address))
    if _chosen:
        os.environ[GLOO] = _chosen
    else:  # no interface has it, for example behind NAT
        os.environ.pop(GLOO, None)


def _advertised() -> str:
    """Return the host in the URL at which other hosts reach this site's worker; "" on a site without a worker."""
    scheme, _, place = get_system().node.ref.gateway_address.partition("://")
    return place.rpartition(":")[0].strip("[]") if scheme == "tcp" else ""


def _resolved(name: str) -> str:
    """Return the address of a name; "" if it cannot be resolved here."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _interface_of(address: str) -> str:
    """Return the interface that has this address; "" if there is none."""
    import psutil

    found = (name for name, entries in psutil.net_if_addrs().items() if address in (e.address for e in entries))
    return next(found, "")


#: Variables of Slurm's tasks and steps, and of MPI's processes. The process that started this one may have them, and
#: frameworks would read them as the rank's. Variables of the whole job stay.
_OF_TASKS = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASK", "SLURM_GTIDS"),
    *("SLURM_STEP", "SLURM_LAUNCH_NODE", "SLURM_SRUN_COMM", "SLURM_DISTRIBUTION", "PMI_", "PMIX_", "OMPI_COMM_WORLD_"),
    *("MV2_COMM_WORLD_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
#: The time for a rank to reach rank 0's store, which exists before its address is sent (seconds).
CONNECT_TIMEOUT = 20.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """The address at which the ranks of a mesh meet, and the number of ranks."""

    address: str
    port: int
    world_size: int
    local_size: int
    store_port: int = 0  # for programs in the ranks that create their own groups


class _Member:
    """The process group of this process, if this module created it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.opened: Opened | None = None  # its connections
        self.given_up: dict[str, int] = {}  # the last group of each series that can no longer be joined
        # On rank 0, the stores of the next group, and of the previous group, for ranks that are still joining it.
        self.stores: deque[object] = deque(maxlen=2)


_member = _Member()


def reserve(world_size: int, local_size: int, *, local: bool, serve: bool = True) -> Meeting:
    """Reserve the address at which the ranks meet, on rank 0.

    Args:
        local: all ranks are on this machine, so the loopback address is sufficient.
        serve: open the store at once, for ``join``; otherwise the port stays free for a later listener.
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
    """Connect to the ranks' store; with a listening socket, create the store."""
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
    """Set torchrun's environment variables, and remove a launcher's variables about another world."""
    local = meeting.local_size
    for name in [each for each in os.environ if each.startswith(_OF_TASKS)]:
        del os.environ[name]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % local),
        WORLD_SIZE=str(meeting.world_size),
        LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local),
        GROUP_WORLD_SIZE=str(meeting.world_size // local),
        ROLE_NAME="rank",
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(meeting.world_size),
        MASTER_ADDR=meeting.address,
        MASTER_PORT=str(meeting.port),
        TORCHELASTIC_RUN_ID=f"{meeting.address}:{meeting.port}",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
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
    """Leave the current process group and join a new one as this rank. It becomes torch's default group.

    Args:
        number: the name of a series of groups, and the number of this group in it.
        join_timeout: how long the ranks wait for each other (seconds).
        timeout: limit for each collective (seconds); None for torch's default.
        options: passed to ``torch.distributed.init_process_group``.
    """
    distributed = _distributed()
    leave()
    set_environment(meeting, rank)
    series, which = number
    if "gloo" in backend:
        choose_interface(LOOPBACK if meeting.address == LOOPBACK else own_address())
    with opening() as opened:
        store = _store(meeting)
        store.set_timeout(timedelta(seconds=join_timeout))
        with _member.lock:
            if which <= _member.given_up.get(series, 0):
                raise RuntimeError(
                    f"process group {which} was given up before rank {rank} joined it: join the next group"
                )
            # From here on, ``abandon`` shuts this connection down.
            _member.opened = opened
        try:
            if timeout is not None:
                options["timeout"] = timedelta(seconds=timeout)
            # torch names groups by this count, and a failed attempt leaves it incremented: this rank would then use
            # another name for the group than a new rank does.
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
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        let_go_of_groups()
        gc.collect()  # the group's connections close when its last work object is freed


def abandon(number: tuple[str, int] = ("", 0), patience: float = 0.0) -> bool:
    """Abort every collective of the group that ``join`` made or is making. Callable from any thread.

    The group is unusable afterwards; ``join`` or ``leave`` removes it.

    Args:
        number: this group, and the groups before it in the series, cannot be joined from now on.
        patience: the time for threads in torch to return from it (seconds).

    Returns:
        Whether these threads have returned.
    """
    series, which = number
    with _member.lock:
        _member.given_up[series] = max(which, _member.given_up.get(series, 0))
    _break_connections()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized() and distributed.get_backend() != "gloo":
        abort = getattr(distributed.group.WORLD, "abort", None)  # exists for NCCL
        if abort is not None:
            abort()
    inside = {thread: frame for thread, top in current_frames().items() if (frame := _in_torch(top)) is not None}
    deadline = time.monotonic() + patience
    while inside:
        tops = current_frames()
        inside = {thread: frame for thread, frame in inside.items() if frame in _stack(tops.get(thread))}
        if inside and time.monotonic() >= deadline:
            return False
        if inside:
            time.sleep(0.001)
            _break_connections()  # a running join may have opened more connections
    return True


def _break_connections() -> None:
    with _member.lock:
        joined = _member.opened is not None
        if _member.opened is not None:
            _member.opened.shut_down()
    if joined:  # groups of some of the ranks (such as those of a DeviceMesh) have separate connections
        shut_down_all()


def _stack(top: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while top is not None:
        frames.append(top)
        top = top.f_back
    return frames


def _in_torch(top: FrameType) -> FrameType | None:
    """Return the outermost frame of a thread that is joining a group, or runs torch code that executes collectives."""
    parts = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}torch{os.sep}autograd{os.sep}")
    for frame in reversed(_stack(top)):
        if frame.f_code is join.__code__ or any(part in frame.f_code.co_filename for part in parts):
            return frame
    return None
