"""Output of ranks: ``subscribe`` to it as it comes, or read back what was kept (``logs``).

Output belongs to the *origin* of the call that caused it, through any number of actors. An origin is a text that a
front end chooses: the notebook's is the cell that runs. ``set_origin`` says it for what the calling thread or task
does from now on, ``on_behalf_of`` for a block, and ``calling_origin`` is the one that a call made here has.

This module holds names only; ``monarch_kernel.runtime.actor`` has the code.
"""

# With it, a process that has no actor system yet can make one.
import monarch_kernel.runtime.actor.system  # noqa: F401  # pyright: ignore[reportUnusedImport]
from monarch_kernel.runtime.actor.context import calling_origin, on_behalf_of, set_origin
from monarch_kernel.runtime.actor.output.logs import logs
from monarch_kernel.runtime.actor.output.output_hub import subscribe
from monarch_kernel.runtime.actor.output.rank_output import RankOutput

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
