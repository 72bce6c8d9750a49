"""Output of ranks: ``subscribe`` to it as it arrives, or read the output that host agents have kept (``logs``).

Output belongs to the *origin* of the call that caused it, through any number of actors. An origin is a text that a
front end chooses; in a notebook it is the id of the running cell. ``set_origin`` sets it for the calling thread or
task, ``on_behalf_of`` for a block, and ``calling_origin`` is the origin of a call made here.

This module holds names only; ``monarch_kernel.runtime.actor`` has the code.
"""

# This import lets a process that has no actor system create one.
import monarch_kernel.runtime.actor.system  # noqa: F401  # pyright: ignore[reportUnusedImport]
from monarch_kernel.runtime.actor.context import calling_origin, on_behalf_of, set_origin
from monarch_kernel.runtime.actor.output import RankOutput, logs, subscribe

# Former names.
calling_cell = calling_origin
set_cell = set_origin

__all__ = [
    "RankOutput",
    "calling_cell",
    "calling_origin",
    "logs",
    "on_behalf_of",
    "set_cell",
    "set_origin",
    "subscribe",
]
