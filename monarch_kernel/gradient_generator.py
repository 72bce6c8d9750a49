"""What programs import from ``monarch.gradient_generator``; the names are also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import grad_function, grad_generator

__all__ = ["grad_function", "grad_generator"]
