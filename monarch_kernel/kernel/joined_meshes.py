"""Jobs that others have started, as meshes of the notebook: join one, and let go of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from IPython.core.error import UsageError

from monarch_kernel.actor import ProcMesh
from monarch_kernel.display.quantities import duration
from monarch_kernel.engines import engine
from monarch_kernel.engines.join.announcements import JoinError
from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.meshes import format_ranks
from monarch_kernel.subscriptions import Subscription

if TYPE_CHECKING:
    from monarch_kernel.engines.join.controller import JoinController

_told: Subscription | None = None


def join(session: MeshSession, name: str, machines: Mapping[str, Sequence[str]]) -> str:
    """Join a job, and make it the mesh in use.

    Args:
        machines: further ones to look for its ranks on; see ``JoinController.add_machines``.

    Returns:
        One line for the user.
    """
    if name in session.proc_meshes() and not engine().is_joined(session.proc_meshes()[name]):
        raise UsageError(f"%mesh join: there is a mesh {name!r} here already; stop it first (%mesh down {name})")
    began = time.monotonic()
    jobs = engine().joined_jobs()
    _tell_of_reformed(session, jobs)
    try:
        jobs.add_machines(machines)
        procs = jobs.join(name)
    except JoinError as error:
        raise UsageError(f"%mesh join: {error}") from None
    session.choose(name)
    held = jobs.held_ranks(procs)
    missing = sorted(procs.dead())
    absent = f"; not there: {format_ranks(missing, limit=6)}" if missing else ""
    took = duration(time.monotonic() - began)
    lines = [f"job {name}: {shape(procs)}, joined in {took}{absent}; %mesh leave lets go of it, and the job goes on"]
    for error in dict.fromkeys(held.values()):
        ranks = format_ranks([rank for rank, said in held.items() if said == error], limit=6)
        lines.append(f"  held after {error}: {ranks}; %mesh pm shows where, and they end with %mesh leave")
    return "\n".join(lines)


def _tell_of_reformed(session: MeshSession, jobs: JoinController) -> None:
    """Say once when the mesh of a joined job was formed anew, and use it if the one before it was in use."""
    global _told
    if _told is not None:
        return

    def tell(name: str, text: str) -> None:
        if session.chosen in (None, name):
            session.choose(name)
        print(text, file=sys.stderr, flush=True)

    _told = jobs.on_reformed.subscribe(tell)


def leave(session: MeshSession, name: str | None) -> str:
    """Let go of a joined job.

    Returns:
        One line for the user.
    """
    procs = session.find(name, "%mesh leave")
    if not engine().is_joined(procs):
        raise UsageError(f"%mesh leave: mesh {procs.name} is this kernel's own; %mesh down {procs.name} stops it")
    engine().joined_jobs().leave(procs)
    session.let_go(procs.name)
    left = f"; {session.chosen} is in use now" if session.chosen else ""
    return f"job {procs.name}: left, and it goes on{left}"


def shape(procs: ProcMesh) -> str:
    """How many ranks, and in which dimensions."""
    count = len(procs)
    sizes = ", ".join(f"{label}={size}" for label, size in procs.extent.items())
    return f"{count} rank{'s' * (count != 1)} ({sizes})"
