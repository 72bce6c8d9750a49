"""What programs import from ``monarch.simulator.config``; the name is also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import set_meta

__all__ = ["set_meta"]
