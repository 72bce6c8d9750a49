"""Names of ``monarch.memory``: the GPU memory history of the ranks."""

from monarch_kernel.runtime.tensor.api.profiling import (
    dump_memory_snapshot,
    record_memory_history,
)

__all__ = ["dump_memory_snapshot", "record_memory_history"]
