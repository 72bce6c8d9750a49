"""What programs import from ``monarch.common.stream``; the names are also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import Stream, get_active_stream

__all__ = ["Stream", "get_active_stream"]
