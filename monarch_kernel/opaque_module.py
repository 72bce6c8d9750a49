"""What programs import from ``monarch.opaque_module``; the name is also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import OpaqueModule

__all__ = ["OpaqueModule"]
