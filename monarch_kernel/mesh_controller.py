"""Names of ``monarch.mesh_controller``, also available in ``monarch_kernel.tensor``."""

from monarch_kernel.tensor import RemoteException

__all__ = ["RemoteException"]
