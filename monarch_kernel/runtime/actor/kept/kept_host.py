"""`KeptHost`: a host whose meshes outlive their controller (long because a class is not split over files).

The mesh's host agent (the *keeper*) keeps a record for later controllers. It has parts: how the procs of each proc mesh
were started, how the actors of each actor mesh of the root were created, and the program's own notes. The controller
sends a part when it changes, before the change takes effect, so a killed controller leaves a record without gaps.

Only meshes of the root are kept. Meshes owned by actors in the controller's process end with that process.
"""

from __future__ import annotations

import logging
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_kernel.protocol.kept_mesh import (
    FILES,
    LOG,
    PROCS,
    SOCKET,
    Hear,
    Held,
    Keep,
    KeptInfo,
    LetGo,
    Taken,
    TakeOver,
)
from monarch_kernel.protocol.messages import Death, DeathKind, ProcRef
from monarch_kernel.protocol.placement import Placement
from monarch_kernel.protocol.serialize import dumps_flat, loads
from monarch_kernel.runtime.actor.calls.pending import ask_agent
from monarch_kernel.runtime.actor.healing.healed import MAX_KEPT_CHECKPOINT, HealError
from monarch_kernel.runtime.actor.healing.healer import SpawnedActors, SpawnedProcs
from monarch_kernel.runtime.actor.hosts import daemons
from monarch_kernel.runtime.actor.hosts.attachment import dial_all
from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh, HostRef, HostUse
from monarch_kernel.runtime.actor.kept import folders
from monarch_kernel.runtime.actor.kept.inspection import KeptError, end_from_outside, folder_of
from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh, settled
from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
from monarch_kernel.runtime.actor.system import ActorSystem, get_actor_system
from monarch_kernel.runtime.mesh.shape import SINGLE, Extent, Region
from monarch_kernel.runtime.node.future import resolved
from monarch_kernel.runtime.supervision import OwnedMesh

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.wire_types import Body, Buffers, MessageLink


log = logging.getLogger(__name__)

#: The time limit for a keeper to answer (seconds).
TIMEOUT = 30.0
#: The default time without a controller after which a kept mesh ends (seconds).
IDLE = 12 * 3600.0


#: The key of the part of the record that lists former host agents, which have died.
FORMER = "former:"
#: The key of the part that records how ranks start.
PLACEMENT = "placement:"


class KeptHost:
    """This machine as a host whose procs outlive this process. ``keep`` and ``attach`` return it.

    Attributes:
        name: the name for ``attach``.
        hosts: the host mesh to spawn on.
        idle: seconds without a controller after which it ends.
        missed: the number of bytes of output from the time without a controller that were not delivered, by proc;
            ``logs`` returns those that its host agent has kept.
        lost: why this process no longer holds it; "" while it does.
    """

    def __init__(self, system: ActorSystem, name: str, agent: ProcRef, idle: float) -> None:
        self._system = system
        self._agent = agent
        self._agents = {agent.id}  # the host agent and its predecessors, which have died
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}  # the parts of the record, by mesh
        self._notes: dict[str, bytes] = {}
        self.name = name
        self.idle = idle
        self.missed: dict[str, int] = {}
        self.lost = ""
        self.hosts = self._hosts_of(agent)

    def _hosts_of(self, agent: ProcRef) -> HostMesh:
        region = SINGLE.region
        return HostMesh(self._system, (HostRef(agent, agent.host),), region, use=HostUse(), name=self.name)

    @property
    def is_kept(self) -> bool:
        """Whether its host agent is alive. If not, its procs are dead, too, and ``heal()`` starts another agent."""
        return not self.lost and self._agent.id not in self._system.node.deaths

    # -- what is on it ------------------------------------------------------------------------------

    @property
    def proc_meshes(self) -> list[ProcMesh]:
        """The proc meshes on it, oldest first."""
        known = self._system.proc_meshes.values()
        return [mesh for mesh in known if not mesh._tool and self._holds(mesh._procs)]

    @property
    def actor_meshes(self) -> list[ActorMesh[Any]]:
        """The actor meshes on it that the controller spawned, oldest first."""
        records = self._system.healer.spawned_actors.values()
        return [actors_record.mesh for actors_record in records if self._holds(actors_record.mesh._procs)]

    def actors(self, name: str) -> ActorMesh[Any]:
        """Return the newest actor mesh on it that was spawned under this name.

        Raises:
            LookupError: there is no such mesh; the message lists the names of the others.
        """
        found = self.actor_meshes
        for mesh in reversed(found):
            if mesh._name == name:
                return mesh
        known = ", ".join(dict.fromkeys(mesh._name for mesh in found)) or "none"
        raise LookupError(f"there are no actors {name!r} on {self.name} (there are: {known})")

    def note(self, key: str, value: object) -> None:
        """Store a value for later controllers. It may contain meshes of this host."""
        self._notes[key] = pickled = dumps_flat(value)
        self._send(f"note:{key}", pickled)

    def noted(self, key: str) -> Any:
        """Return the value kept under this key; None if there is none."""
        pickled = self._notes.get(key)
        return None if pickled is None else loads(pickled)

    def _holds(self, procs: tuple[ProcRef, ...]) -> bool:
        return bool(procs) and all(ref.agent in self._agents for ref in procs)

    # -- the record -----------------------------------------------------------------------------------

    def _on_change(self, mesh_id: str) -> None:
        if self.lost:
            return
        system = self._system
        healer = system.healer
        mesh = system.proc_meshes.get(mesh_id)
        procs_record = healer.spawned_procs.get(mesh_id)
        actors_record = healer.spawned_actors.get(mesh_id)
        root = system.client.mesh_id
        if "#" in mesh_id:
            self._on_checkpoint(mesh_id)
        elif procs_record is not None and mesh is not None:
            if mesh._owner == root and self._holds(mesh._procs):
                self._known[mesh_id] = f"{PROCS}{mesh_id}"
                self._send(self._known[mesh_id], dumps_flat(self._procs_part(mesh, procs_record)))
        elif actors_record is not None:
            if actors_record.owner == root and self._holds(actors_record.mesh._procs):
                self._known[mesh_id] = f"actors:{mesh_id}"
                self._send(self._known[mesh_id], dumps_flat(_actors_part(actors_record)))
        elif mesh_id in self._known:
            self._on_forgotten(mesh_id)

    def _on_forgotten(self, mesh_id: str) -> None:
        gone = [mesh_id]
        if self._known[mesh_id].startswith(PROCS):  # the actors on these procs have ended with them
            records = self._system.healer.spawned_actors
            for actor in self._known:
                actors_record = records.get(actor)
                if actors_record is not None and all(
                    ref.id.startswith(f"{mesh_id}.") for ref in actors_record.mesh._procs
                ):
                    gone.append(actor)
        for known in [known for known in self._known if known.partition("#")[0] in gone]:
            self._send(self._known.pop(known), b"")

    def _on_checkpoint(self, which: str) -> None:
        actor, _, rank = which.partition("#")
        if actor in self._known:
            body, buffers = self._system.healer.checkpoints[actor, int(rank)]
            if len(body) <= MAX_KEPT_CHECKPOINT:
                self._known[which] = f"state:{which}"
                self._send(self._known[which], dumps_flat((body, buffers)))
            elif which in self._known:
                self._send(self._known.pop(which), b"")

    def _procs_part(self, mesh: ProcMesh, procs_record: SpawnedProcs) -> tuple[object, ...]:
        successors = self._system.node.successors
        replaced: dict[str, ProcRef] = {}
        for ref in mesh._procs:
            while (after := successors.get(ref.id)) is not None:
                replaced[ref.id] = ref = after
        policy = self._system.healer.restarts.policy(mesh._mesh_uid)
        return (
            *(mesh._mesh_uid, mesh.name, mesh._procs, mesh._shape, mesh._host_region, replaced),
            *(procs_record.messages, procs_record.bootstrap, procs_record.incarnations, policy),
        )

    def _send(self, key: str, part: bytes) -> None:
        self._system.node.send(self._agent.id, Keep(key), part)

    def _on_placed(self, agent: str) -> None:
        placement = self._system.placements.by_agent.get(agent)
        if agent == self._agent.id and placement is not None and not self.lost:
            self._send(PLACEMENT, msgspec.msgpack.encode(placement))

    # -- when the host agent dies ---------------------------------------------------------------------

    def _renew(self, agent: str) -> ProcRef | None:
        """Return a replacement for a dead agent of this host; None if the dead agent does not belong to this host."""
        with self._lock:
            if agent not in self._agents or self.lost:
                return None
            if self._agent.id in self._system.node.deaths:
                try:
                    self._agent = _start_keeper(self._system, self.name, self.idle, daemons.END_TIMEOUT)
                except (OSError, RuntimeError) as e:
                    raise HealError(
                        f"{self.name} cannot be healed: its host agent died, and no other started: {e}"
                    ) from e
                former = list(self._agents)
                self._agents.add(self._agent.id)
                self.hosts = self._hosts_of(self._agent)
                answer = ask_agent(self._system.node, self._agent, f"attach {self.name}", TakeOver, False).get(TIMEOUT)
                msgspec.msgpack.decode(answer, type=Held)
                self._system.placements.renew(self._system, former, self._agent)
                ask_agent(self._system.node, self._agent, f"attach {self.name}", Hear).get(TIMEOUT)
                self._send(FORMER, dumps_flat(self._agents))
                for key, pickled in self._notes.items():
                    self._send(f"note:{key}", pickled)
                for mesh_id in list(self._known):
                    self._on_change(mesh_id)
            return self._agent

    # -- taking over ----------------------------------------------------------------------------------

    def _take(self, force: bool) -> None:
        """Become the holder, and take over the record of the previous one.

        Raises:
            KeptError: another living controller holds it.
        """
        system = self._system
        answer = ask_agent(system.node, self._agent, f"attach {self.name}", TakeOver, force).get(TIMEOUT)
        held = msgspec.msgpack.decode(answer, type=Held)
        if held.refused:
            raise KeptError(
                f"mesh {self.name!r} cannot be attached to: {held.refused}"
                + ("; detach there, or take it over by force" if held.held else ""),
                held.held,
            )
        self.idle = held.idle
        system.node.handlers[Taken] = _on_taken
        self._subscription = system.healer.records_changed.subscribe(self._on_change)
        self._placed = system.placements.changed.subscribe(self._on_placed)
        system.healer.renewers.append(self._renew)
        _hosts.append(self)
        _taken_over.pop(self.name, None)
        try:
            self._rebuild(held)
        except Exception as e:  # the record is from another version of this package
            self._forget("its record could not be read")
            ask_agent(system.node, self._agent, f"attach {self.name}", LetGo).get(TIMEOUT)
            raise KeptError(f"mesh {self.name!r} was left untouched, as its record cannot be read here: {e}") from e
        told = ask_agent(system.node, self._agent, f"attach {self.name}", Hear).get(TIMEOUT)
        heard = msgspec.msgpack.decode(told, type=dict[str, tuple[int, int]])
        self.missed = {proc: left for proc, (_, left) in heard.items() if left}
        for mesh in self.proc_meshes:  # apply restart policies to deaths from the time without a controller
            for ref in mesh._target().procs:
                death = system.node.deaths.get(ref.id)
                if death is not None:
                    system.healer.takes_over(ref.id, death, partial(_not_restarted, mesh.name))

    def _rebuild(self, held: Held) -> None:
        node = self._system.node
        parts = {key: loads(part) for key, part in held.record.items() if not key.startswith(("note:", PLACEMENT))}
        if PLACEMENT in held.record:
            placement = msgspec.msgpack.decode(held.record[PLACEMENT], type=Placement)
            self._system.placements.place(self._system, self._agent, placement)
        refs: dict[str, ProcRef] = {}
        self._agents |= parts.pop(FORMER, set())
        for key, part in parts.items():
            if key.startswith(PROCS):
                refs.update({ref.id: ref for ref in (*part[2], *part[5].values())})
                node.successors.update({old: self._near(ref) for old, ref in part[5].items()})
        node.generation += 1
        for ref in refs.values():
            node.deaths.pop(ref.id, None)  # this process may have held the mesh before
            node.refs[ref.id] = self._near(ref)
        node.pids.update(held.pids)
        for proc in refs:
            # Declared before any mesh here owns these procs, so that no owner is notified; the caller reports them.
            if proc in held.deaths:
                node.declare_dead(proc, held.deaths[proc])
            elif proc in node.successors:
                node.declare_dead(proc, Death.of(DeathKind.EXITED, "it was replaced", proc, refs[proc].host))
            elif refs[proc].agent in self._agents - {self._agent.id}:
                cause = "its host agent died"
                died = Death.of(DeathKind.AGENT_UNREACHABLE, cause, refs[proc].agent, refs[proc].host)
                node.declare_dead(refs[proc].agent, died)
                node.declare_dead(proc, died)
        for key, part in parts.items():
            mesh_id = key.partition(":")[2]
            self._known[mesh_id] = key
            if key.startswith(PROCS):
                self._rebuild_procs(*part)
            elif key.startswith("actors:"):
                self._rebuild_actors(*part)
            else:
                actor, _, rank = mesh_id.partition("#")
                self._system.healer.checkpoints[actor, int(rank)] = part
        living = [proc for proc in refs if proc not in node.deaths]
        for proc in living:
            node.link_to(proc)  # now, so that the loss of the link reports the end of the rank
        node.watch([proc for proc in living if proc not in node.deaths])
        for key, part in held.record.items():
            if key.startswith("note:"):
                self._notes[key.removeprefix("note:")] = part
        self._system.changed()

    def _near(self, ref: ProcRef) -> ProcRef:
        """Return the reference to a proc of this machine, which other hosts reach in the same way as this process."""
        here = self._system.node.ref
        return msgspec.structs.replace(ref, gateway=here.gateway, gateway_address=here.gateway_address)

    def _rebuild_procs(
        self,
        uid: str,
        name: str,
        procs: tuple[ProcRef, ...],
        region: Region,
        hosts: Region,
        _replaced: object,
        messages: dict[int, Any],
        bootstrap: tuple[Body, Buffers],
        incarnations: dict[int, int],
        policy: Any,
    ) -> None:
        system = self._system
        root = system.client
        procs = tuple(map(self._near, procs))
        mesh = ProcMesh(system, uid, name, procs, region, hosts, root.mesh_id, resolved(system.node.poller, name, True))
        system.proc_meshes[uid] = mesh
        system.tree.spawned_procs(self._owned(uid, name, region.extent, mesh._target().procs))
        root.owned.append(mesh)
        ours = {id(message): self._ours(message) for message, _ in messages.values()}
        healer = system.healer
        healer.spawned_procs[uid] = SpawnedProcs(
            {rank: (ours[id(message)], at) for rank, (message, at) in messages.items()}, bootstrap, [], incarnations
        )
        if policy is not None:
            healer.restarts.add(uid, policy)

    def _ours(self, message: Any) -> Any:
        """Return the message that started procs, with this process as their owner and root."""
        return msgspec.structs.replace(message, owner=self._system.node.ref, root=self._system.node.ref)

    def _rebuild_actors(
        self,
        actor: str,
        name: str,
        mesh_name: str,
        cls: bytes,
        procs: tuple[ProcRef, ...],
        region: Region,
        tool: bool,
        body: bytes,
        buffers: tuple[int, ...],
    ) -> None:
        system = self._system
        root = system.client
        procs = tuple(map(self._near, procs))
        ready = resolved(system.node.poller, f"{name}.__init__")
        mesh: ActorMesh[Any] = ActorMesh(system, actor, name, mesh_name, cls, procs, region, ready)
        system.tree.spawned_actors(self._owned(actor, name, region.extent, mesh._target().procs, tool))
        root.owned.append(mesh)
        system.healer.spawned_actors[actor] = SpawnedActors(mesh, root.mesh_id, body, buffers)

    def _owned(
        self, mesh_id: str, name: str, extent: Extent, procs: tuple[ProcRef, ...], tool: bool = False
    ) -> OwnedMesh:
        system = self._system
        dead = {rank for rank, ref in enumerate(procs) if ref.id in system.node.deaths}
        return OwnedMesh(mesh_id, name, system.client.mesh_id, extent, procs, tool=tool, dead=dead)

    # -- releasing ------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Release the host and leave everything on it running: any controller can attach to it, also this one again."""
        self._must_have()
        ask_agent(self._system.node, self._agent, f"detach {self.name}", LetGo).get(TIMEOUT)
        self._forget(f"mesh {self.name!r} was detached from: attach to it again")

    def down(self) -> None:
        """End everything on it, and its host agent. The name is free afterwards."""
        self._must_have()
        meshes = self.proc_meshes
        self.lost = f"mesh {self.name!r} was ended"
        self._drop()
        if self._agent.id not in self._system.node.deaths:
            self.hosts.shutdown().get(TIMEOUT)
            return
        for mesh in meshes:  # the host agent has died, and so have its procs
            settled(mesh.stop()).get(TIMEOUT)

    def _must_have(self) -> None:
        if self.lost:
            raise KeptError(self.lost)

    def _drop(self) -> None:
        if self in _hosts:
            _hosts.remove(self)
            self._subscription.close()
            self._placed.close()
            self._system.healer.renewers.remove(self._renew)

    def _forget(self, why: str) -> list[ProcRef]:
        """Release ownership of all meshes on it. Returns their procs."""
        system = self._system
        meshes, actors = self.proc_meshes, self.actor_meshes
        self.lost = why
        self._drop()
        procs = {ref.id: ref for mesh in meshes for ref in mesh._target().procs}
        for actor in actors:
            system.tree.stopped(actor._actor)
            system.healer.forget(actor._actor)
        for mesh in meshes:
            mesh._forget()
        gone = {id(mesh) for mesh in (*meshes, *actors)}
        system.client.owned[:] = [mesh for mesh in system.client.owned if id(mesh) not in gone]
        system.changed()
        return list(procs.values())

    def _taken(self, by: Taken) -> None:
        why = f"mesh {self.name!r} was taken over by process {by.pid} on {by.host}"
        _taken_over[self.name] = why
        for ref in self._forget(why):
            self._system.node.declare_dead(ref.id, Death.of(DeathKind.LEFT, why, ref.id, ref.host))

    def __repr__(self) -> str:
        meshes = ", ".join(mesh.name for mesh in self.proc_meshes) or "nothing yet"
        return f"<KeptHost {self.name}: {self.lost or meshes}>"


def _actors_part(actors_record: SpawnedActors) -> tuple[object, ...]:
    mesh = actors_record.mesh
    pickled = mesh._cls_or_pickle if isinstance(mesh._cls_or_pickle, bytes) else dumps_flat(mesh._cls)
    return (
        *(mesh._actor, mesh._name, mesh._mesh_name, pickled, mesh._procs, mesh._shape, mesh._spec.tool),
        *(actors_record.body, actors_record.buffers),
    )


def _not_restarted(mesh: str, why: str) -> None:
    log.warning("mesh %s: %s", mesh, why)


def _on_taken(link: MessageLink, message: Taken, _body: Body) -> None:
    for host in list(_hosts):
        if host._agent.id == link.peer:
            host._taken(message)


_hosts: list[KeptHost] = []
_taken_over: dict[str, str] = {}


# -- public functions -----------------------------------------------------------------------------


def keep(name: str, idle: float = IDLE) -> KeptHost:
    """Start a host agent on this machine that outlives this process, together with all procs started on it.

    Args:
        name: the name for ``attach``.
        idle: the time without a controller after which it ends (seconds); 0: no limit.

    Raises:
        KeptError: a kept mesh of this name exists, or the host agent could not start; the message names the cause.
        ValueError: the name or the limit is invalid.
    """
    system = _controller("keep")
    if idle < 0:
        raise ValueError(f"idle={idle!r} must be a number of seconds, or 0 for no limit")
    try:
        agent = _start_keeper(system, name, idle)
    except FileExistsError as e:
        raise KeptError(f"{e}: attach to it, end it, or choose another name") from None
    except (OSError, RuntimeError) as e:
        raise KeptError(f"mesh {name!r} cannot be kept: {e}") from e
    host = KeptHost(system, name, agent, idle)
    host._take(False)
    return host


def _start_keeper(system: ActorSystem, name: str, idle: float, release: float = 0.0) -> ProcRef:
    with folders.make_folder(name, release) as folder:
        try:
            url = daemons.start_daemon(folder, SOCKET, LOG, keep=True, idle=idle).url
        except BaseException:
            folder.remove(FILES)
            raise
    return dial_all(system, [url], TIMEOUT)[0]


def attach(name: str | os.PathLike[str], force: bool = False) -> KeptHost:
    """Take over a kept mesh: its procs and actors belong to this controller from now on.

    Args:
        name: its name, or the path of its folder.
        force: take it even from another live controller, which then loses it.

    Raises:
        KeptError: there is no such mesh, or another controller holds it.
    """
    system = _controller("attach")
    agent, label = _find(system, os.fspath(name))
    for host in held():
        if host._agent.id == agent.id:
            raise KeptError(f"mesh {label!r} is already attached in this process")
    host = KeptHost(system, label, agent, 0.0)
    host._take(force)
    return host


def end_kept(name: str | os.PathLike[str], force: bool = False) -> KeptInfo:
    """End a kept mesh, whether or not this process holds it.

    Args:
        force: end it even if another controller holds it.

    Returns:
        Its description.

    Raises:
        KeptError: there is no such mesh, or another controller holds it.
    """
    folder = folder_of(os.fspath(name))
    label = os.path.basename(folder)
    for host in held():
        if host.name == label and host.is_kept:
            info = folders.read_description(folder)
            host.down()
            return info or KeptInfo(label, 0, "", "", 0.0)
    _taken_over.pop(label, None)
    return end_from_outside(folder, force)


def held() -> list[KeptHost]:
    """Return the kept hosts that this process holds."""
    return [host for host in _hosts if not host._system._closed and not host.lost]


def taken_over() -> dict[str, str]:
    """Return the kept meshes that another process took from this one by force: an explanation by name."""
    return dict(_taken_over)


def kept_host_of(mesh: ProcMesh) -> KeptHost | None:
    """Return the kept host on which this mesh runs; None if the mesh ends with this process."""
    return next((host for host in held() if host._holds(mesh._procs)), None)


def _controller(what: str) -> ActorSystem:
    system = get_actor_system()
    if not system.is_root:
        raise RuntimeError(f"{what}() is for the controller: ranks cannot start or end what outlives it")
    return system


def _find(system: ActorSystem, name: str) -> tuple[ProcRef, str]:
    """Connect to the keeper of a mesh. Return it with the mesh's name."""
    folder = folder_of(name)
    label = os.path.basename(folder)
    try:
        return dial_all(system, [f"ipc://{folder}/{SOCKET}"], TIMEOUT)[0], label
    except ConnectionError as e:
        raise KeptError(f"mesh {label!r} cannot be attached to: {e}") from e
