"""What programs import from ``monarch.opaque_object``; the names are also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import OpaqueObject, OpaqueRef, opaque_method

__all__ = ["OpaqueObject", "OpaqueRef", "opaque_method"]
