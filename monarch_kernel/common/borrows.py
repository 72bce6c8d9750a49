"""What programs import from ``monarch.common.borrows``; the name is also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import Borrow

__all__ = ["Borrow"]
