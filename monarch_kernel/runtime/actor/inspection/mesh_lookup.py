"""Look up the proc mesh behind a mesh, its hosts, and the stacks of its ranks, for tools.

``spawn_tool`` starts a process for a tool's own actors on one of the hosts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from monarch_kernel.protocol.messages import AskStacks, StackRead
from monarch_kernel.protocol.refs import Death
from monarch_kernel.runtime.actor.calls.pending import ask_agent
from monarch_kernel.runtime.actor.context import current
from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh
from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh
from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.runtime.mesh.shape import SINGLE, Extent, Region


@dataclass(frozen=True, slots=True)
class Whole:
    """A proc mesh as spawned, and its ranks that a given mesh covers.

    Attributes:
        procs: the whole mesh.
        ranks: for each rank of the given mesh, its rank in the whole mesh.
        uid: the unique name of the mesh in all processes.
    """

    procs: ProcMesh
    ranks: tuple[int, ...]
    uid: str


def whole_of(mesh: object) -> Whole:
    """Return the proc mesh that ``mesh`` is a slice of, or that its actors were spawned on.

    Raises:
        TypeError: ``mesh`` is neither a proc mesh nor an actor mesh.
        LookupError: this process does not know the proc mesh of these actors.
    """
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


def deaths_of(procs: ProcMesh) -> dict[int, Death]:
    """Return the deaths of a proc mesh's ranks, as far as this process knows them."""
    known = procs._system.node.deaths
    return {rank: known[ref.id] for rank, ref in enumerate(procs._target().procs) if ref.id in known}


def hosts_of(procs: ProcMesh) -> list[str]:
    """Return the host name of each rank."""
    return [ref.host for ref in procs._target().procs]


def home() -> Any:
    """Return the proc mesh of the running actor, or else of any actor of this process; None if there is none."""
    here = current.get()
    mesh = here.actor_instance.proc_mesh if here is not None else None
    if mesh is None:
        for instance in list(get_system().actors.values()):
            mesh = mesh or getattr(instance, "proc_mesh", None)
    return mesh


@dataclass(frozen=True, slots=True)
class ToolHost:
    """One host of a mesh.

    Attributes:
        key: unique, the same for every mesh that this host is in.
        name: the display name of the host.
        mesh: the host as a host mesh of one.
        gone: why it cannot be reached; empty if this process knows of no reason.
    """

    key: str
    name: str
    mesh: HostMesh
    gone: str = ""


def each_host(mesh: object) -> list[ToolHost]:
    """Return the hosts of a mesh of hosts, procs or actors, each once, in the order of their ranks.

    Raises:
        TypeError: ``mesh`` is no mesh.
        RuntimeError: the host mesh was shut down.
        LookupError: this process does not know the procs of these actors.
    """
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

    It is hidden from users: it is not in lists of meshes, it is not healed, and its end is reported only to its pending
    calls. It ends with this process, or when it is stopped, even on hosts whose meshes are kept.
    """
    return host.mesh._spawn_tool(name)


#: Extra time for the answer of a host agent, beyond the time limit of its reads (seconds).
_GRACE = 0.5


def stacks_from_outside(
    mesh: Any, ranks: Iterable[int], *, native: bool = False, timeout: float = 2.0
) -> dict[int, StackRead]:
    """Read the stacks of ranks of a proc mesh with py-spy, which their host agents run.

    Args:
        mesh: the proc mesh.
        ranks: ranks of the mesh.
        native: include frames of native code, which pauses each rank for about 100 ms.
        timeout: the time limit for all ranks together (seconds).

    Returns:
        The stack of each rank, or why it could not be read; a failed read never raises.
    """
    target = mesh._target()
    node = mesh._system.node
    chosen = sorted(set(ranks))
    by_agent: dict[str, list[int]] = {}
    for rank in chosen:
        by_agent.setdefault(target.procs[rank].agent, []).append(rank)
    found: dict[int, StackRead] = {}
    calls: list[tuple[list[int], Any]] = []
    for members in by_agent.values():
        first = target.procs[members[0]]
        if first.id == node.id:  # no agent watches this process
            found[members[0]] = StackRead(first.id, mesh._system.pid, first.host, "", "", "it is the calling process")
            continue
        names = [target.procs[rank].id for rank in members]
        call = ask_agent(node, first.agent_ref(), f"{mesh.name}.stacks", AskStacks, names, native, timeout)
        calls.append((members, call))
    deadline = time.monotonic() + timeout + _GRACE
    for members, call in calls:
        reads: dict[str, StackRead] = {}
        trouble = "its host agent did not report it"
        try:
            reply = call.get(max(0.0, deadline - time.monotonic()))
            reads = {read.proc: read for read in msgspec.msgpack.decode(reply, type=list[StackRead])}
        except TimeoutError:
            trouble = f"its host agent did not answer within {timeout + _GRACE:g} s"
        except Exception as error:  # the agent is dead; the error says why
            trouble = str(error)
        for rank in members:
            ref = target.procs[rank]
            found[rank] = reads.get(ref.id) or StackRead(ref.id, node.pids.get(ref.id, 0), ref.host, "", "", trouble)
    return found
