"""What Monarch has in ``monarch.builtins.log``: logging on the ranks, in order with their operations."""

from monarch_kernel.runtime.tensor.api.profiling import log_remote, set_logging_level_remote

__all__ = ["log_remote", "set_logging_level_remote"]
