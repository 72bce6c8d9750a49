"""The hosts behind a mesh one by one, and processes on them for a tool's own actors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh
from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh
from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
from monarch_kernel.runtime.mesh.shape import SINGLE


@dataclass(frozen=True, slots=True)
class ToolHost:
    """One host of a mesh.

    Attributes:
        key: unique, the same for every mesh that this host is in.
        name: of the host, for people.
        mesh: the host as a host mesh of one.
        gone: why it cannot be reached; empty if this process knows of no reason.
    """

    key: str
    name: str
    mesh: HostMesh
    gone: str = ""


def each_host(mesh: Any) -> list[ToolHost]:
    """The hosts of a mesh of hosts, procs or actors, each once, in the order of their ranks.

    Raises:
        TypeError: ``mesh`` is no mesh.
        RuntimeError: the host mesh was shut down.
        LookupError: this process does not know the procs of these actors.
    """
    from monarch_kernel.runtime.actor.inspection.mesh_lookup import whole_of

    if isinstance(mesh, ActorMesh):
        of = whole_of(mesh)
        mine = {of.procs._target().procs[rank].agent for rank in of.ranks}
        return [host for host in each_host(of.procs) if host.key in mine]
    if isinstance(mesh, ProcMesh):
        mesh = mesh.host_mesh
    if not isinstance(mesh, HostMesh):
        raise TypeError(f"a mesh of hosts, procs or actors is needed, not {mesh!r}")
    if mesh._down:
        raise RuntimeError("HostMesh has already been shut down")
    deaths = mesh._system.node.deaths
    found: dict[str, ToolHost] = {}
    for ref in mesh._selected():
        if ref.agent.id not in found:
            death = deaths.get(ref.agent.id)
            one = HostMesh(mesh._system, (ref,), SINGLE.region, None, mesh._use, mesh._name, True)
            found[ref.agent.id] = ToolHost(ref.agent.id, ref.name, one, death.cause if death is not None else "")
    return list(found.values())


def spawn_tool(host: ToolHost, name: str) -> ProcMesh:
    """Start a process for a tool's actors on a host: in the host's own interpreter and environment, in the root folder.

    Users do not see it: lists of meshes leave it out, it is not healed, and its end is reported to its pending calls
    only. It ends with this process, or when it is stopped; on hosts whose meshes are kept, too.
    """
    return host.mesh._spawn_tool(name)
