"""Names of ``monarch.gradient_generator``, also available in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import GradientGenerator, grad_function, grad_generator, gradient_execution_order

__all__ = ["GradientGenerator", "grad_function", "grad_generator", "gradient_execution_order"]
