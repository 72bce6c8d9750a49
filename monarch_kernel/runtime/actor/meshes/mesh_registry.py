"""List the meshes of a controller, and shut it down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch_kernel.runtime.actor import system as systems
from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
from monarch_kernel.runtime.actor.process import get_system, started
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.subscriptions import Subscription


def shutdown_context(host_timeout: float | None = None) -> Future[None]:
    """Stop every actor, proc and host agent of this controller. The next use of the API starts a new runtime.

    Args:
        host_timeout: limit for host agents to end their procs (seconds); None for the default.
    """
    systems.shutdown(host_timeout)
    done: Future[None] = Future(Poller(background=False), "shutdown_context")
    done._poller.close()
    done._resolve(None)
    return done


def list_proc_meshes() -> list[ProcMesh]:
    """Return the proc meshes that this controller has spawned and not stopped, newest last.

    Meshes of tools are not included.
    """
    if not started():
        return []
    return [mesh for mesh in get_system().proc_meshes.values() if not mesh._stopped and not mesh._tool]


def on_change(callback: Callable[[], None]) -> Subscription:
    """Call ``callback()`` whenever a mesh was spawned, stopped, or lost a proc; the polling thread calls it.

    Returns:
        The subscription; close (or call) it to unsubscribe.
    """
    return systems.mesh_changes.subscribe(callback)


def get_mesh(name: str) -> Any:
    """Return the newest proc mesh of this controller with this name.

    Raises:
        LookupError: there is no such mesh; the message lists the names of the others.
    """
    meshes = list_proc_meshes()
    for mesh in reversed(meshes):
        if mesh.name == name:
            return mesh
    known = ", ".join(mesh.name for mesh in meshes) or "none"
    raise LookupError(f"no mesh is called {name!r} here (there are: {known})")
