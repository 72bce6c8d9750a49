"""What programs import from ``monarch.mesh_controller``; the names are also in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import RemoteException

__all__ = ["RemoteException"]
