"""A process group over dimensions of a mesh; the name is also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import RemoteProcessGroup

__all__ = ["RemoteProcessGroup"]
