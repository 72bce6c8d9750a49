"""Functions of the ranks that Monarch has ready-made: logging and random numbers."""

from monarch_kernel.builtins.log import log_remote, set_logging_level_remote
from monarch_kernel.builtins.random import set_manual_seed_remote

__all__ = ["log_remote", "set_logging_level_remote", "set_manual_seed_remote"]
