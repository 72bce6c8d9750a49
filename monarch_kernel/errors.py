"""The errors that calls on meshes raise."""

from monarch_kernel.protocol.faults import Fault, capture, label_files
from monarch_kernel.protocol.refs import Death, DeathKind
from monarch_kernel.runtime.actor.errors import (
    ActorError,
    MeshFailure,
    RankFailure,
    SupervisionError,
    build_actor_error,
)
from monarch_kernel.runtime.mesh.shape import UnknownDimensionError

__all__ = [
    "ActorError",
    "Death",
    "DeathKind",
    "Fault",
    "MeshFailure",
    "RankFailure",
    "SupervisionError",
    "UnknownDimensionError",
    "build_actor_error",
    "capture",
    "label_files",
]
