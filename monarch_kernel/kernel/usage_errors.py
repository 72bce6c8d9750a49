"""Error messages of magics for invalid lines, or lines that cannot be executed now: one sentence with a remedy."""

from __future__ import annotations

from IPython.core.error import UsageError

from monarch_kernel.actor import ProcMesh
from monarch_kernel.engines import tool_runtime


def usage_error(command: str, message: str) -> UsageError:
    """Return a usage error of a command."""
    return UsageError(f"{command}: {message}")


def replacing(mesh: str, whom: str = "them") -> str:
    """Return how to replace dead ranks of a mesh, as a clause: `%mesh heal m replaces them`.

    The clause depends on the engine, and on what started the ranks.
    """
    if any(each.name == mesh and tool_runtime().is_joined(each) for each in tool_runtime().list_proc_meshes()):
        return f"what has started this job decides whether it starts {whom} again"
    if "heal" in tool_runtime().OFFERS:
        return f"%mesh heal {mesh} replaces {whom}"
    return f"%mesh restart {mesh} starts the whole mesh again"


def check_drives(procs: ProcMesh, what: str) -> None:
    """Raise UsageError if another viewer controls a joined job; only the controlling viewer may run code in it.

    Args:
        what: the requested action.
    """
    if tool_runtime().is_joined(procs):
        other = tool_runtime().driver_of(procs)
        if other:
            raise UsageError(
                f"{what}: {other} has control of job {procs.name}, and this notebook looks on; "
                f"%mesh join {procs.name} --drive takes over"
            )
