"""The meshes that front ends name by the keys of their views."""

from __future__ import annotations

from monarch_kernel.actor import ProcMesh
from monarch_kernel.introspection import whole_of
from monarch_kernel.meshes import list_proc_meshes


def key_of(mesh: ProcMesh) -> str:
    """The key of a mesh's `MeshView`; of a slice, that of the mesh as spawned."""
    return whole_of(mesh).uid


def mesh_of(key: str) -> ProcMesh:
    """The mesh with that key.

    Raises:
        LookupError: it was stopped.
    """
    for mesh in list_proc_meshes():
        if key_of(mesh) == key:
            return mesh
    raise LookupError("this mesh was stopped, or belongs to another kernel now")
