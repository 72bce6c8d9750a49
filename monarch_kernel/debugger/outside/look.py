"""Read the processes that a command names: by their pids, the workers of torchrun, or a Slurm job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monarch_kernel.debugger.outside import selection, slurm
from monarch_kernel.debugger.outside.outside_report import Look
from monarch_kernel.debugger.outside.processes import LaunchedRank, OutsideError
from monarch_kernel.debugger.outside.reading import read_processes
from monarch_kernel.debugger.outside.remote_exec import remote_exec_note
from monarch_kernel.debugger.source_locations import Label


@dataclass(frozen=True, slots=True)
class LookRequest:
    """The processes to read: exactly one of the first three fields is set.

    Attributes:
        pids: processes of this machine, as in `123,456`.
        torchrun: the pid of a torchrun agent; 0: the only torchrun job on this machine.
        slurm: a Slurm job, or a step of it, as in `4711` or `4711.0`.
        native: include native frames.
        all_threads: include threads without user code.
        apart: the time between the two readings (seconds).
    """

    pids: str | None = None
    torchrun: int | None = None
    slurm: str | None = None
    native: bool = False
    all_threads: bool = False
    apart: float = 1.0


def look(request: LookRequest, label: Label | None = None) -> Look:
    """Read processes from outside, and report why they wait.

    Args:
        request: the processes to read, and how to read them.
        label: labels files, such as `Cell In[3]`.

    Raises:
        OutsideError: there are no such processes, they belong to another user, or the request is invalid.
    """
    ways = [request.pids, request.torchrun, request.slurm]
    if sum(way is not None for way in ways) != 1:
        raise OutsideError("give one of --pids 123,456, --torchrun [PID] and --slurm JOB")
    if not request.apart >= 0:
        raise OutsideError(f"--apart takes a number of seconds of at least 0, not {request.apart:g}")
    notes: Sequence[str] = ()
    if request.slurm is not None:
        name, way = f"Slurm job {request.slurm}", f"--slurm {request.slurm} --prepare"
        processes, notes = slurm.read_job(request.slurm, native=request.native, apart=request.apart)
    else:
        chosen = chosen_here(request.pids, request.torchrun)
        if request.pids is not None:
            name, way = f"process{'es' * (len(chosen) > 1)} {request.pids}", f"--pids {request.pids}"
        else:
            agent = f" {request.torchrun}" if request.torchrun else ""
            name, way = f"torchrun{agent}", f"--torchrun{agent}"
        processes = read_processes(chosen, native=request.native, apart=request.apart)
    return Look(
        name,
        processes,
        complete=request.pids is None,
        native=request.native,
        all_threads=request.all_threads,
        notes=(*notes, *remote_exec_note(processes, way)),
        label=label,
    )


def chosen_here(pids: str | None, torchrun: int | None) -> dict[int, LaunchedRank]:
    """Return the processes of this machine that a command names, with their ranks.

    Args:
        pids: as in `123,456`; or
        torchrun: the pid of a torchrun agent; 0: the only torchrun job on this machine.

    Raises:
        OutsideError: there are no such processes, they belong to another user, or `pids` is invalid.
    """
    return selection.torchrun_workers(torchrun or 0) if pids is None else selection.named(parse_pids(pids))


def parse_pids(text: str) -> list[int]:
    """Parse pids such as `123,456`.

    Raises:
        OutsideError: the text is invalid.
    """
    words = [word.strip() for word in text.split(",")]
    wrong = next((word for word in words if not word.isdecimal() or int(word) < 1), None)
    if wrong is not None:
        raise OutsideError(f"--pids takes numbers of processes, such as 123,456, not {wrong!r}")
    return list(dict.fromkeys(map(int, words)))
