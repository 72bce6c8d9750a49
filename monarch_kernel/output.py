"""Output of ranks: ``subscribe`` to it as it comes, or read back what was kept (``logs``)."""

# With it, a process that has no actor system yet can make one.
import monarch_kernel.runtime.actor.system  # noqa: F401  # pyright: ignore[reportUnusedImport]
from monarch_kernel.runtime.actor.context import calling_cell, on_behalf_of, set_cell
from monarch_kernel.runtime.actor.output.logs import logs
from monarch_kernel.runtime.actor.output.output_hub import subscribe
from monarch_kernel.runtime.actor.output.rank_output import RankOutput

__all__ = ["RankOutput", "calling_cell", "logs", "on_behalf_of", "set_cell", "subscribe"]
