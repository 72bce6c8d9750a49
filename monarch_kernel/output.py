"""Output of ranks: ``subscribe`` to it as it comes, or read back what was kept (``logs``)."""

from monarch_kernel.runtime.actor.context import set_cell
from monarch_kernel.runtime.actor.output import RankOutput, logs, subscribe

__all__ = ["RankOutput", "logs", "set_cell", "subscribe"]
