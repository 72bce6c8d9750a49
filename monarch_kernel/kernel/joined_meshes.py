"""Join a job that another program started as a mesh of the notebook, and leave it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from IPython.core.error import UsageError

from monarch_kernel.actor import ProcMesh
from monarch_kernel.debugger import get_debugger
from monarch_kernel.display.quantities import duration
from monarch_kernel.engines import tool_runtime
from monarch_kernel.engines.join.announcements import JoinError
from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.meshes import format_ranks
from monarch_kernel.subscriptions import Subscription

if TYPE_CHECKING:
    from monarch_kernel.engines.join.controller import JoinController

_told: Subscription | None = None


@dataclass(frozen=True)
class Machines:
    """Additional machines to search for joinable jobs; see ``JoinController.add_machines``."""

    commands: Mapping[str, Sequence[str]]
    meet: str


def join(
    session: MeshSession,
    name: str,
    machines: Machines,
    *,
    drive: bool = False,
    hold: float = 0.0,
) -> str:
    """Join a job, and make it the mesh in use.

    Args:
        machines: additional machines to search for its ranks.
        drive, hold: see ``JoinController.join``. With ``drive``, a job that is already joined is only taken over.

    Returns:
        One line for the user.
    """
    if name in session.proc_meshes() and not tool_runtime().is_joined(session.proc_meshes()[name]):
        raise UsageError(f"%mesh join: there is a mesh {name!r} here already; stop it first (%mesh down {name})")
    began = time.monotonic()
    jobs = tool_runtime().joined_jobs()
    if not jobs.notices:
        jobs.notices.subscribe(_say)
    _tell_of_reformed(session, jobs)
    try:
        if drive and name in session.proc_meshes():
            procs = session.proc_meshes()[name]
            jobs.drive(procs)
            _take_stops(procs)
            return f"job {name}: this notebook has control of it now"
        jobs.add_machines(machines.commands, machines.meet)
        procs = jobs.join(name, drive=drive, hold=hold)
        other = jobs.driver_of(procs, ask=False)
    except JoinError as error:
        raise UsageError(f"%mesh join: {error}") from None
    if drive:
        _take_stops(procs)
    session.choose(name)
    held = jobs.held_ranks(procs)
    missing = sorted(procs.dead())
    absent = f"; not there: {format_ranks(missing, limit=6)}" if missing else ""
    took = duration(time.monotonic() - began)
    looks_on = f"; {other} has control, and this notebook looks on" if other else ""
    faults = jobs.faults_of(procs)
    count = sum(each for each, _ in faults.values())
    faulty = f"; the tools there had {count} faults so far, such as {min(faults.items())[1][1]}" if count else ""
    end = "%mesh leave lets go of it, and the job goes on"
    lines = [f"job {name}: {shape(procs)}, joined in {took}{absent}{looks_on}{faulty}; {end}"]
    for error in dict.fromkeys(held.values()):
        ranks = format_ranks([rank for rank, said in held.items() if said == error], limit=6)
        lines.append(f"  held after {error}: {ranks}; %mesh pm shows where, and they end with %mesh leave")
    return "\n".join(lines)


def _take_stops(procs: ProcMesh) -> None:
    """Take over the stops of the previous viewer: ask the ranks to report them."""
    get_debugger().watch(procs)


def _say(job: str, text: str) -> None:
    print(f"job {job}: {text}", file=sys.stderr)


def _tell_of_reformed(session: MeshSession, jobs: JoinController) -> None:
    """Report once that the mesh of a joined job was formed again, and use it if its predecessor was in use."""
    global _told
    if _told is not None:
        return

    def tell(name: str, text: str) -> None:
        if session.chosen in (None, name):
            session.choose(name)
        print(text, file=sys.stderr, flush=True)

    _told = jobs.on_reformed.subscribe(tell)


def leave(session: MeshSession, name: str | None) -> str:
    """Leave a joined job.

    Returns:
        One line for the user.
    """
    procs = session.find(name, "%mesh leave")
    if not tool_runtime().is_joined(procs):
        raise UsageError(f"%mesh leave: mesh {procs.name} is this kernel's own; %mesh down {procs.name} stops it")
    tool_runtime().joined_jobs().leave(procs)
    session.let_go(procs.name)
    left = f"; {session.chosen} is in use now" if session.chosen else ""
    return f"job {procs.name}: left, and it goes on{left}"


def shape(procs: ProcMesh) -> str:
    """Return the number of ranks and the dimensions as text."""
    count = len(procs)
    sizes = ", ".join(f"{label}={size}" for label, size in procs.extent.items())
    return f"{count} rank{'s' * (count != 1)} ({sizes})"
