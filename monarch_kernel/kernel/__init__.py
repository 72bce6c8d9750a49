"""The Jupyter kernel: its application, interrupts, kernelspec, magics and output."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_kernel.actor import ProcMesh


def current_mesh() -> ProcMesh:
    """Return the proc mesh that `%%mesh` cells run on, for spawning actors. `monarch_kernel.get_mesh` finds other
    meshes.

    Raises:
        LookupError: no mesh is in use.
    """
    from monarch_kernel.kernel.session import session

    return session().current_mesh()
