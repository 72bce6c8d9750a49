"""What programs import from ``monarch.python_local_mesh``; the name is also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import python_local_mesh

__all__ = ["python_local_mesh"]
