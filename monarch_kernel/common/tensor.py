"""What programs import from ``monarch.common.tensor``; the name is also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import Tensor

__all__ = ["Tensor"]
