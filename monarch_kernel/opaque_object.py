"""Names of ``monarch.opaque_object``, also available in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import OpaqueObject, OpaqueRef, opaque_method

__all__ = ["OpaqueObject", "OpaqueRef", "opaque_method"]
