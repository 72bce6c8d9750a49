"""Lookup of the proc mesh behind a mesh that a tool was given, and of its hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monarch_kernel.protocol.refs import Death
from monarch_kernel.runtime.actor.context import current
from monarch_kernel.runtime.actor.process import get_system


@dataclass(frozen=True, slots=True)
class Whole:
    """A proc mesh as spawned, and its ranks that a given mesh covers.

    Attributes:
        procs: the whole mesh.
        ranks: for each rank of the given mesh, its rank in the whole mesh.
        uid: the unique name of the mesh in all processes.
    """

    procs: Any
    ranks: tuple[int, ...]
    uid: str


def whole_of(mesh: Any) -> Whole:
    """The proc mesh that ``mesh`` is a slice of, or that its actors were spawned on.

    Raises:
        TypeError: ``mesh`` is neither a proc mesh nor an actor mesh.
        LookupError: this process does not know the proc mesh of these actors.
    """
    from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
    from monarch_kernel.runtime.mesh.shape import Extent, Region

    if isinstance(mesh, ProcMesh):
        procs = mesh._whole()
        if procs is mesh and mesh._region.nelements != len(mesh._procs):
            # A slice from another process: this process does not know the shape of the mesh as spawned.
            flat = Region.from_extent(Extent(("ranks",), (len(mesh._procs),)))
            procs = ProcMesh(mesh._system, mesh._mesh_uid, mesh.name, mesh._procs, flat, mesh._host_region)
    elif isinstance(mesh, ActorMesh):
        refs = {ref.id for ref in mesh._target().procs}
        for procs in reversed(mesh._system.proc_meshes.values()):
            if refs <= {ref.id for ref in procs._target().procs}:
                break
        else:
            raise LookupError(f"the procs of {mesh!r} were not spawned by this process: use their proc mesh")
    else:
        raise TypeError(f"a mesh of procs or actors is needed, not {mesh!r}")
    places = {ref.id: rank for rank, ref in enumerate(procs._target().procs)}
    return Whole(procs, tuple(places[ref.id] for ref in mesh._target().procs), procs._mesh_uid)


def deaths_of(procs: Any) -> dict[int, Death]:
    """The deaths of a proc mesh's ranks, as far as this process knows them."""
    known = procs._system.node.deaths
    return {rank: known[ref.id] for rank, ref in enumerate(procs._target().procs) if ref.id in known}


def hosts_of(procs: Any) -> list[str]:
    """The host name of each rank."""
    return [ref.host for ref in procs._target().procs]


def home() -> Any:
    """The proc mesh of the running actor, or else of any actor of this process; None if there is none."""
    here = current.get()
    mesh = here.actor_instance.proc_mesh if here is not None else None
    if mesh is None:
        for instance in list(get_system().actors.values()):
            mesh = mesh or getattr(instance, "proc_mesh", None)
    return mesh
