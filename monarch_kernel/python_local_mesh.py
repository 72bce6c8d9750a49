"""Name of ``monarch.python_local_mesh``, also available in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import python_local_mesh

__all__ = ["python_local_mesh"]
