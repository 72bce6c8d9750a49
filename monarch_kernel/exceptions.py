"""``monarch.exceptions``: what operations on meshes raise, by the names that programs for Monarch have."""

from monarch_kernel.actor import ActorError, SupervisionError
from monarch_kernel.tensor import DeviceMeshError, MixedTensorsError, RemoteException

__all__ = ["ActorError", "DeviceMeshError", "MixedTensorsError", "RemoteException", "SupervisionError"]
