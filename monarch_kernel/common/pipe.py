"""What programs import from ``monarch.common.pipe``; the names are also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import Pipe, create_pipe, remote_generator

__all__ = ["Pipe", "create_pipe", "remote_generator"]
