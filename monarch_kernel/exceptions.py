"""Exceptions of mesh operations under the names of ``monarch.exceptions``."""

from monarch_kernel.actor import ActorError, SupervisionError
from monarch_kernel.tensor import DeviceMeshError, MixedTensorsError, RemoteException

__all__ = ["ActorError", "DeviceMeshError", "MixedTensorsError", "RemoteException", "SupervisionError"]
