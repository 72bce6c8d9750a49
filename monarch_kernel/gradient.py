"""What programs import from ``monarch.gradient``; the name is also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import GradientGenerator

__all__ = ["GradientGenerator"]
