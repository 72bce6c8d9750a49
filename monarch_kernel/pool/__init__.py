"""Distribute independent work over the ranks of a mesh: `map`, `submit`, `scatter` and `gather` of a `ProcMesh`.

The package uses only the public actor API. Two actors on every rank do the work: `PoolExecutor` runs functions, and
`Control` interrupts them. `Pool` in the caller's process holds the queue: the next task goes to any idle rank.
"""

from monarch_kernel.pool.mapping import Mapping, on_progress, start_map
from monarch_kernel.pool.pool import Pool, TaskFuture, gather, pool_of, scatter

__all__ = ["Mapping", "Pool", "TaskFuture", "gather", "on_progress", "pool_of", "scatter", "start_map"]
