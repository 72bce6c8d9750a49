"""Find user code on a rank: where a thread is in it, and its faults without frames of this package."""

from __future__ import annotations

import asyncio
import os
import selectors
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import msgspec

from monarch_kernel import programs
from monarch_kernel.introspection import failed_by_peer
from monarch_kernel.protocol.faults import Fault, capture
from monarch_kernel.spmd import (
    Meeting,
    are_broken,
    count_meetings,
    interrupt_first,
    join,
    leave,
    reserve,
    set_environment,
)
from monarch_kernel.thread_frames import current_frames, without_last_frames

# Set up `torch.distributed` on a rank: the environment of torchrun, and a process group if requested.


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
    torch = sys.modules.get("torch")
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

    store = torch.distributed.distributed_c10d._get_default_store()
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


# Hide traceback frames of this package, and frames that were only waiting when an interrupt arrived.

_PACKAGE = programs.PACKAGE + os.sep
#: Files whose frames are hidden if an interrupt hits waiting code.
WAITING = (os.path.dirname(asyncio.__file__) + os.sep, selectors.__file__)
# debugpy and its pydevd trace the kernel while the debugger of JupyterLab is on.
_DEBUGGERS = (f"{os.sep}debugpy{os.sep}", f"{os.sep}pydevd", f"{os.sep}bdb.py", f"{os.sep}pdb.py")


def cut(
    traceback: TracebackType | None, *, interrupt: bool = False, within: tuple[str, ...] = ()
) -> TracebackType | None:
    """Return the traceback up to the last frame outside this package; the whole traceback if there is none.

    Args:
        interrupt: the traceback belongs to a KeyboardInterrupt; also hide trailing frames that wait or trace.
        within: also hide trailing frames in files whose paths contain one of these.
    """
    return without_last_frames(traceback, lambda file: _hidden(file, interrupt, within)) or traceback


def _hidden(file: str, interrupt: bool, within: tuple[str, ...]) -> bool:
    if file.startswith(_PACKAGE) or any(part in file for part in within):
        return True
    return interrupt and (file.startswith(WAITING) or any(part in file for part in _DEBUGGERS))


_KERNEL = os.path.join(_PACKAGE, "kernel", "")
# Folders without user code: the location of a rank is the innermost line outside these folders.
_FOREIGN = tuple(
    {
        _PACKAGE,
        *(path + os.sep for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))),
    }
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def where_is(thread: int, is_foreign: Callable[[str], bool]) -> tuple[str, int, str] | None:
    """Return file, line and function of the innermost frame of `thread` in a file that is not foreign."""
    frames: Mapping[int, object] = current_frames()
    frame = frames.get(thread)
    innermost = None
    while frame is not None:
        code = frame.f_code
        if not is_foreign(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        innermost = innermost or (code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return innermost


def is_foreign(file: str) -> bool:
    """Return whether a file is part of this package, Python or an installed package, rather than user code."""
    # Code that libraries generate as text has no source lines; use the line that runs it.
    return file.startswith((*_FOREIGN, "<frozen", "<string>")) or any(part in file for part in _INSTALLED)


def fault_of(error: BaseException) -> Fault:
    """Return the fault of an exception that ended a cell."""
    interrupt_first(error)
    # For an interrupt, the line of user code matters, not the waiting code below it.
    waits = WAITING if isinstance(error, KeyboardInterrupt) else ()
    fault = capture(error, (_KERNEL, *_ipython(), *waits))
    return msgspec.structs.replace(fault, of_peer=True) if failed_by_peer(error) else fault


def _ipython() -> tuple[str, ...]:
    module = sys.modules.get("IPython")
    file = getattr(module, "__file__", None)
    return (os.path.dirname(file) + os.sep,) if file else ()
