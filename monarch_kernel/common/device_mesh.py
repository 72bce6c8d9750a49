"""What programs import from ``monarch.common.device_mesh``; the names are also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import RemoteProcessGroup, get_active_mesh, no_mesh, slice_mesh, to_mesh

__all__ = ["RemoteProcessGroup", "get_active_mesh", "no_mesh", "slice_mesh", "to_mesh"]
