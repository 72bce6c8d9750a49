"""What programs import from ``monarch.common.tensor``; the names are also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import Tensor, reduce, reduce_

__all__ = ["Tensor", "reduce", "reduce_"]
