"""Which viewer of a joined job may run code in it: the one that has control."""

from __future__ import annotations

from IPython.core.error import UsageError

from monarch_kernel.actor import ProcMesh
from monarch_kernel.engines import engine


def check_drives(procs: ProcMesh, what: str) -> None:
    """Raise UsageError if another viewer has control of a joined job.

    Args:
        what: what was asked for.
    """
    if engine().is_joined(procs):
        other = engine().driver_of(procs)
        if other:
            raise UsageError(
                f"{what}: {other} has control of job {procs.name}, and this notebook looks on; "
                f"%mesh join {procs.name} --drive takes over"
            )
