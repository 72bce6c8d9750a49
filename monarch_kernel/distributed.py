"""Tensors whose parts are on the ranks of a mesh, and feel local. Names are those of ``monarch.distributed``, and more.

This module holds names only; ``monarch_kernel.runtime.tensor.sharded`` has the code.
"""

# This import lets a process that has no actor system create one.
import monarch_kernel.runtime.actor.system  # noqa: F401  # pyright: ignore[reportUnusedImport]
from monarch_kernel.runtime.tensor.rank.offers import offer
from monarch_kernel.runtime.tensor.sharded.controller.adoption import adopt
from monarch_kernel.runtime.tensor.sharded.controller.factories import arange, empty, full, ones, rand, randn, zeros
from monarch_kernel.runtime.tensor.sharded.controller.mesh import Mesh, distribute
from monarch_kernel.runtime.tensor.sharded.controller.sharded_world import FallbackWarning
from monarch_kernel.runtime.tensor.training.controller.checkpoints import load_checkpoint, save_checkpoint
from monarch_kernel.runtime.tensor.training.controller.module_to_mesh import module_to_mesh
from monarch_kernel.runtime.tensor.training.controller.remote_module import RemoteModule

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
