"""Name of ``monarch.opaque_module``, also available in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import OpaqueModule

__all__ = ["OpaqueModule"]
