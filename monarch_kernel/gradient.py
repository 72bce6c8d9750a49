"""Name of ``monarch.gradient``, also available in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import GradientGenerator

__all__ = ["GradientGenerator"]
