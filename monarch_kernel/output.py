"""Output of ranks: ``subscribe`` to it as it arrives, or read the output kept by host agents (``logs``).

Output belongs to the *origin* of the call that caused it, through any number of actors. An origin is a string that a
front end chooses; a notebook uses the id of the running cell. ``set_origin`` sets it for the calling thread or task,
``on_behalf_of`` for a block. ``calling_origin`` returns the origin of calls made here.

This module only exports names; ``monarch_kernel.runtime.actor`` has the code.
"""

# Registers the actor system, so that a process without one can create it.
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
