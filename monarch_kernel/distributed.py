"""Tensors whose parts are on the ranks of a mesh, and feel local. Names are those of ``monarch.distributed``, and more.

This module holds names only; ``monarch_kernel.runtime.tensor.sharded`` has the code.
"""

# This import lets a process that has no actor system create one.
import monarch_kernel.runtime.actor.system  # noqa: F401  # pyright: ignore[reportUnusedImport]
from monarch_kernel.runtime.tensor.sharded.controller.joining import FallbackWarning
from monarch_kernel.runtime.tensor.sharded.controller.mesh import Mesh, distribute

__all__ = ["FallbackWarning", "Mesh", "distribute"]
