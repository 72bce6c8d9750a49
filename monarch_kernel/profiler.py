"""Names of ``monarch.profiler``: the profiler on the ranks."""

from monarch_kernel.runtime.tensor.api.profiling import (
    Schedule,
    profile,
    record_function,
)

__all__ = ["Schedule", "profile", "record_function"]
