"""What programs import from ``monarch.common.opaque_ref``; the name is also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import OpaqueRef

__all__ = ["OpaqueRef"]
