"""Find meshes by the keys of their views, which front ends use."""

from __future__ import annotations

from monarch_kernel.actor import ProcMesh
from monarch_kernel.introspection import whole_of
from monarch_kernel.meshes import list_proc_meshes


def key_of(mesh: ProcMesh) -> str:
    """Return the key of a mesh's `MeshView`; for a slice, that of the mesh as spawned."""
    return whole_of(mesh).uid


def mesh_of(key: str) -> ProcMesh:
    """Return the mesh with that key.

    Raises:
        LookupError: the mesh was stopped.
    """
    for mesh in list_proc_meshes():
        if key_of(mesh) == key:
            return mesh
    raise LookupError("this mesh was stopped, or belongs to another kernel now")
