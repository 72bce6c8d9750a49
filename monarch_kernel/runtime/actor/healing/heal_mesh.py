"""``heal_mesh`` heals a mesh and returns a handle that is usable at once; ``respawn_actors`` recreates actors."""

from __future__ import annotations

from typing import Any, TypeVar

from monarch_kernel.runtime.actor.healing.healed import HEAL_TIMEOUT, Healed, HealError, HostSource
from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh
from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh
from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.runtime.node.future import Future, nothing

Mesh = TypeVar("Mesh", bound=ProcMesh | ActorMesh[Any])


def heal_mesh(mesh: Mesh, hosts: HostMesh | HostSource | None = None, timeout: float = HEAL_TIMEOUT) -> Mesh:
    """Replace the dead procs of a proc mesh, or those under an actor mesh. See ``ProcMesh.heal``.

    A mesh of another kind (``monarch_kernel.distributed.Mesh``) heals itself, by its ``__heal_mesh__``.

    Returns:
        The healed mesh, usable at once: calls on it wait for the heal. Await it, or read its report ``healed``, to
        know that the heal is complete.

    Raises:
        HealError: this process did not spawn these procs. All other errors are raised when the mesh is awaited.
    """
    heal_itself = getattr(type(mesh), "__heal_mesh__", None)
    if heal_itself is not None:
        return heal_itself(mesh, hosts, timeout)
    if not isinstance(mesh, ProcMesh | ActorMesh):
        raise TypeError(f"heal_mesh takes a proc mesh or an actor mesh, not {type(mesh).__name__}")
    done = _procs_of(mesh).heal(hosts, timeout)
    again: Any = mesh._new_with_region(mesh._shape)
    again._healed = done
    again._ready = done.then(nothing)
    return again


def _procs_of(mesh: ProcMesh | ActorMesh[object]) -> ProcMesh:
    if isinstance(mesh, ProcMesh):
        return mesh
    mine = {ref.id for ref in mesh._target().procs}
    for procs in mesh._system.proc_meshes.values():
        if mine <= {ref.id for ref in procs._target().procs}:
            return procs
    raise HealError(f"the procs of {mesh._name} can be healed only in the process that spawned them")


def actor_meshes_on(procs: ProcMesh) -> list[ActorMesh[Any]]:
    """Return the meshes of actors that this process spawned on procs of this mesh, without those of tools."""
    system = get_system()
    ids = {ref.id for ref in procs._target().procs}
    meshes = [record.mesh for record in list(system.healer.spawned_actors.values())]
    return [
        mesh for mesh in meshes if not mesh._spec.tool and not ids.isdisjoint(ref.id for ref in mesh._target().procs)
    ]


def respawn_actors(procs: ProcMesh, timeout: float = HEAL_TIMEOUT) -> Future[Healed]:
    """Stop the actors of this process on these procs and recreate them there, with their original arguments.

    An actor that has a ``checkpoint`` endpoint and a ``__restore__`` method gets its last checkpoint. Tools, and actors
    that other processes spawned, stay. Calls that this process makes meanwhile wait. Calls of other processes that
    arrive while an actor is stopped fail.

    Raises (in the future):
        Exception: an ``__init__`` or ``__restore__`` failed; that actor is then dead.
        TimeoutError: it took too long.
    """
    return get_system().healer.respawn(procs, timeout)
