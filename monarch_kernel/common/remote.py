"""What programs import from ``monarch.common.remote``; the name is also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import remote

__all__ = ["remote"]
