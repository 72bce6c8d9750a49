"""New actors in the processes of the old ones, for code that has changed: what a tool needs of the healer."""

from __future__ import annotations

from typing import Any

from monarch_kernel.runtime.actor.healing.report import HEAL_TIMEOUT, Healed
from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh
from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.runtime.node.future import Future


def actor_meshes_on(procs: ProcMesh) -> list[ActorMesh[Any]]:
    """The meshes of actors that this process spawned on procs of this mesh, without those of tools."""
    system: Any = get_system()
    ids = {ref.id for ref in procs._target().procs}
    meshes = [record.mesh for record in list(system.healer.spawned_actors.values())]
    return [
        mesh for mesh in meshes if not mesh._spec.tool and not ids.isdisjoint(ref.id for ref in mesh._target().procs)
    ]


def respawn_actors(procs: ProcMesh, timeout: float = HEAL_TIMEOUT) -> Future[Healed]:
    """Stop the actors of this process on these procs and create them again there, with their original arguments.

    An actor that has a ``checkpoint`` endpoint and a ``__restore__`` method gets its last checkpoint. Tools, and actors
    that other processes spawned, stay. Calls that this process makes meanwhile wait; calls of others that arrive while
    an actor is stopped fail.

    Raises (in the future):
        Exception: an ``__init__`` or ``__restore__`` failed; that actor is dead then. TimeoutError: it took too long.
    """
    return get_system().healer.respawn(procs, timeout)
