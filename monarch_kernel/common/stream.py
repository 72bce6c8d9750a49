"""What programs import from ``monarch.common.stream``; the name is also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import Stream

__all__ = ["Stream"]
