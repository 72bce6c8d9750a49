"""Whether Python itself could bring the tools into running processes: `sys.remote_exec`, from Python 3.14 on."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from monarch_kernel.debugger.outside.reading import OutsideProcess

#: The first version with `sys.remote_exec` (PEP 768); both sides need it, and the same minor version.
FIRST = (3, 14)


def remote_exec_note(
    processes: Sequence[OutsideProcess], own: tuple[int, int] = (sys.version_info[0], sys.version_info[1])
) -> tuple[str, ...]:
    """A sentence if these processes could be joined while they run; none otherwise.

    Args:
        processes: what was read.
        own: the version of this Python.
    """
    if own < FIRST or any(each.python != own for each in processes):
        return ()
    return (
        f"These processes run Python {own[0]}.{own[1]}, as this one does: sys.remote_exec could bring a whole debugger "
        "into them. That is not done here: processes that are to be joined are prepared when they are started.",
    )
