"""The errors that calls on meshes raise."""

from monarch_kernel.runtime.actor.errors import ActorError, MeshFailure, RankFailure, SupervisionError
from monarch_kernel.runtime.mesh.shape import UnknownDimensionError

__all__ = ["ActorError", "MeshFailure", "RankFailure", "SupervisionError", "UnknownDimensionError"]
