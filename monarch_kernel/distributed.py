"""Distributed tensors, whose shards live on the ranks of a mesh: the names of ``monarch.distributed``, and more.

This module only exports names; ``monarch_kernel.runtime.tensor.sharded`` has the code.
"""

# Registers the actor system, so that a process without one can create it.
import monarch_kernel.runtime.actor.system  # noqa: F401  # pyright: ignore[reportUnusedImport]
from monarch_kernel.runtime.tensor.rank.offers import offer
from monarch_kernel.runtime.tensor.sharded.controller.adoption import (
    adopt,
    arange,
    empty,
    full,
    ones,
    rand,
    randn,
    zeros,
)
from monarch_kernel.runtime.tensor.sharded.controller.mesh import Mesh, distribute
from monarch_kernel.runtime.tensor.sharded.controller.sharded_world import FallbackWarning
from monarch_kernel.runtime.tensor.training.module_to_mesh import (
    RemoteModule,
    load_checkpoint,
    module_to_mesh,
    save_checkpoint,
)

__all__ = [
    "FallbackWarning",
    "Mesh",
    "RemoteModule",
    "adopt",
    "arange",
    "distribute",
    "empty",
    "full",
    "load_checkpoint",
    "module_to_mesh",
    "offer",
    "ones",
    "rand",
    "randn",
    "save_checkpoint",
    "zeros",
]
