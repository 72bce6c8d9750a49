"""Replace dead procs and actors (long because all of it shares one record of what was spawned).

A dead proc stays dead: its successor is another proc, with a new id, at the same rank of its mesh. No message for the
old proc can therefore reach the new one, and records of the old one's death stay true. Mesh handles refer to the procs
that they were created with, and ask the node for their current successors (``Node.current``).

The process that spawned procs starts their successors. The process that spawned actors on them keeps their class and
arguments, and recreates them. A successor is announced once the healer's own actors on it are created and restored. The
announcement goes to the root. The root forwards it to every process it has a link to, and keeps it for later requests
(a process asks when it learns of a death). Owners in other processes create their actors when they receive it, and the
healer waits for them.

An actor that has a ``checkpoint`` endpoint and a ``__restore__`` method gets, after its new ``__init__``, the result of
its last ``checkpoint``. Its owner's process keeps that result, whichever process made the call.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_kernel import logs
from monarch_kernel.protocol.messages import (
    AskEnded,
    AskReplaced,
    Bootstrap,
    Call,
    Checkpoint,
    Create,
    Death,
    DeathKind,
    KillProcs,
    ProcRef,
    ProcSpec,
    Replaced,
    SpawnProcs,
    StopActor,
)
from monarch_kernel.protocol.messages import encode as encode_header
from monarch_kernel.protocol.serialize import dumps, loads
from monarch_kernel.runtime.actor.calls.pending import OneCall, acknowledge, ask_agent
from monarch_kernel.runtime.actor.calls.target import Target
from monarch_kernel.runtime.actor.context import calling_origin, origin
from monarch_kernel.runtime.actor.healing.healed import HEAL_TIMEOUT as TIMEOUT
from monarch_kernel.runtime.actor.healing.healed import Healed, HealError, HostSource, Replacement
from monarch_kernel.runtime.actor.ports.holders import give
from monarch_kernel.runtime.mesh.shape import SINGLE
from monarch_kernel.runtime.node.future import Future, gathered
from monarch_kernel.runtime.supervision import RestartPolicy, Restarts
from monarch_kernel.subscriptions import Subscribers

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh
    from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
    from monarch_kernel.runtime.actor.ports.port import Port
    from monarch_kernel.runtime.actor.process import System
    from monarch_kernel.runtime.actor.wire_types import Body, Buffers, MessageLink

log = logs.logger(__name__)


class SpawnedActors(msgspec.Struct):
    """How the actors of one mesh were created."""

    mesh: ActorMesh[object]
    owner: str
    body: bytes
    buffers: tuple[int, ...]
    ports: Sequence[Any] = ()  # the ports in that pickle; each successor gets them again


class SpawnedProcs(msgspec.Struct):
    """How the procs of one mesh were started."""

    messages: dict[int, tuple[SpawnProcs, int]]  # by rank: the message, and the index of the rank's proc in it
    bootstrap: tuple[object, tuple[int, ...]]
    spares: list[ProcRef]  # agents of hosts that stay empty until another host is gone
    incarnations: dict[int, int] = msgspec.field(default_factory=dict)
    source: HostSource | None = None  # where further hosts come from


class Healer:
    """Records how this process created its meshes, and replaces their dead ranks."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.spawned_actors: dict[str, SpawnedActors] = {}
        self.spawned_procs: dict[str, SpawnedProcs] = {}
        self.checkpoints: dict[tuple[str, int], tuple[bytes, tuple[int, ...]]] = {}
        self._askers: dict[str, set[str]] = {}
        self._guards: dict[str, threading.Lock] = {}
        self.restarts = Restarts()
        #: Notified with the id of a mesh that was created, healed or forgotten, and with "id#rank" at a checkpoint.
        self.records_changed: Subscribers[[str]] = Subscribers("a record of meshes")
        #: The procs that are being healed. The callbacks get some of them, and whether healing begins or ends.
        self.healing: set[str] = set()
        self.on_healing: Subscribers[[frozenset[str], bool]] = Subscribers("a callback on healing")
        #: Called to get a replacement for a dead host agent; each may return None.
        self.renewers: list[Callable[[str], ProcRef | None]] = []
        handlers = system.node.handlers
        handlers[Replaced] = self._on_replaced
        handlers[AskReplaced] = self._on_ask
        handlers[AskEnded] = self._on_ask_ended
        handlers[Checkpoint] = self._on_checkpoint

    # -- records --------------------------------------------------------------------------------------

    def spawned(
        self,
        mesh: ProcMesh,
        messages: Iterable[SpawnProcs],
        bootstrap: tuple[Body, Buffers],
        policy: RestartPolicy,
    ) -> None:
        """Record the messages that started the procs of a mesh."""
        by_rank = {spec.rank: (message, k) for message in messages for k, spec in enumerate(message.procs)}
        body, buffers = bootstrap
        self.spawned_procs[mesh._mesh_uid] = SpawnedProcs(by_rank, (_flat(body), buffers), [])
        self.restarts.add(mesh._mesh_uid, policy)
        self.noted(mesh._mesh_uid)

    def add_spares(self, mesh: ProcMesh, spares: HostMesh | HostSource) -> None:
        """Add spare hosts of a mesh, or a source of them."""
        record = self.spawned_procs[mesh._mesh_uid]
        if isinstance(spares, HostSource):
            record.source = spares
        else:
            record.spares += [host.agent for host in spares._selected()]

    def born(
        self, mesh: ActorMesh[object], owner: str, body: Body, buffers: Buffers, ports: Sequence[Port[object]]
    ) -> None:
        """Record the pickle from which the actors of a mesh are created, and the ports in it."""
        give(ports, mesh._target())
        if all(ref.id != self._system.node.id for ref in mesh._procs):
            self.spawned_actors[mesh._actor] = SpawnedActors(mesh, owner, _flat(body), buffers, ports)
            self.noted(mesh._actor)

    def forget(self, mesh_id: str) -> None:
        """Drop the records of a mesh that was stopped permanently."""
        if self.spawned_actors.pop(mesh_id, None) is not None:
            for key in [key for key in self.checkpoints if key[0] == mesh_id]:
                del self.checkpoints[key]
        self.spawned_procs.pop(mesh_id, None)
        self._guards.pop(mesh_id, None)
        self.restarts.remove(mesh_id)
        self.noted(mesh_id)

    def noted(self, mesh_id: str) -> None:
        """Notify subscribers that the records of this mesh changed."""
        self.records_changed.notify(mesh_id)

    def _on_checkpoint(self, _link: MessageLink, message: Checkpoint, body: Any) -> None:
        if message.actor in self.spawned_actors:
            self.checkpoints[message.actor, message.rank] = (bytes(body), message.buffers)
            self.noted(f"{message.actor}#{message.rank}")

    # -- healing ----------------------------------------------------------------------------------

    def heal(self, mesh: ProcMesh, hosts: HostMesh | HostSource | None, timeout: float) -> Future[Healed]:
        """Replace the dead procs of a mesh (or slice) and the actors on them; the work runs on a separate thread."""
        procs_record = self.spawned_procs.get(mesh._mesh_uid)
        if procs_record is None:
            raise HealError(
                f"{mesh.name} can be healed only in the process that spawned its procs, and only until it is stopped"
            )

        def work() -> Healed:
            with self._guard(mesh):
                return self._heal(mesh, procs_record, hosts, timeout)

        return self._in_background(f"{mesh.name}.heal", self._broken(mesh), work)

    def respawn(self, mesh: ProcMesh, timeout: float) -> Future[Healed]:
        """Stop the actors that this process spawned on a mesh (or slice), tools excepted, and create them again.

        Their processes stay. Each gets its original arguments and its last checkpoint. Calls of this process that are
        made meanwhile wait. The work runs on a separate thread.
        """
        before = self._living(mesh)
        held = self._system.held_calls

        def work() -> Healed:
            with self._guard(mesh):
                procs = self._living(mesh)  # an earlier heal may have replaced some of them
                new = procs - before
                held.begin(new)
                try:
                    return self._respawn(mesh, procs, time.monotonic() + timeout)
                finally:
                    held.end(new)

        return self._in_background(f"{mesh.name}.respawn", before, work)

    def _guard(self, mesh: ProcMesh) -> threading.Lock:
        """Lock ranks or actors of a mesh during replacement, so that no actor is created twice."""
        return self._guards.setdefault(mesh._mesh_uid, threading.Lock())

    def _living(self, mesh: ProcMesh) -> set[str]:
        return {ref.id for ref in mesh._target().procs} - self._system.node.deaths.keys()

    def _in_background(self, what: str, procs: set[str], work: Callable[[], Healed]) -> Future[Healed]:
        """Run ``work`` on a separate thread. Calls to these procs wait meanwhile."""
        future: Future[Healed] = Future(self._system.node.poller, what)
        waiting = self._system.held_calls
        waiting.begin(procs)
        self._note_healing(procs, True)

        def run() -> None:
            try:
                healed = work()
            except BaseException as e:
                waiting.end(procs)
                self._note_healing(procs, False)
                future._reject(e)
            else:
                waiting.end(procs)
                self._note_healing(procs, False)
                future._resolve(healed)

        threading.Thread(target=run, name="monarch-heal", daemon=True).start()
        return future

    def _note_healing(self, procs: set[str], begins: bool) -> None:
        if begins:
            self.healing |= procs
        else:
            self.healing -= procs
        if procs:
            self.on_healing.notify(frozenset(procs), begins)

    def _respawn(self, mesh: ProcMesh, procs: set[str], deadline: float) -> Healed:
        began = time.monotonic()
        node = self._system.node
        healed = Healed(mesh.name)
        chosen: list[tuple[SpawnedActors, int, ProcRef]] = []
        stops: list[OneCall] = []
        for actors_record in list(self.spawned_actors.values()):
            on = actors_record.mesh
            if on._spec.tool:
                continue
            target = on._target()
            for rank, ref in enumerate(target.procs):
                if ref.id in procs:
                    chosen.append((actors_record, rank, ref))
                    call = OneCall(node, f"{on._name}.stop", target, rank)
                    stops.append(call)
                    if not node.send(ref.id, StopActor(on._actor, call._number, rank, "it is created again")):
                        call.on_peer_dead(ref.id, node.deaths[ref.id])
        for call in stops:
            call.get(max(0.0, deadline - time.monotonic()))
        names: dict[str, None] = {}
        restored: dict[str, None] = {}
        created = [(record, rank, ref, self._create(record, rank, ref)) for record, rank, ref in chosen]
        for record, rank, ref, call in created:
            self._finish([(record, rank, call)], ref, names, restored, deadline)
        places = {ref.id: rank for rank, ref in zip(mesh._shape.ranks(), mesh._target().procs, strict=True)}
        whole = mesh._whole()
        for proc in dict.fromkeys(ref.id for _, _, ref in chosen):
            rank, pid = places[proc], node.pids.get(proc, 0)
            host = node.refs[proc].host
            coords = dict(whole.extent.point(rank))
            healed.replaced.append(Replacement(rank, coords, "actor", "created again", host, pid, host, pid))
        healed.respawned, healed.restored = list(names), list(restored)
        healed.seconds = time.monotonic() - began
        self._system.changed()
        return healed

    def _broken(self, mesh: ProcMesh) -> set[str]:
        """Return the procs of a mesh that are dead, or that hold a dead actor."""
        deaths = self._system.node.deaths
        failed = self._system.tree.failed_on()
        return {ref.id for ref in mesh._target().procs if ref.id in deaths or ref.id in failed}

    def _heal(
        self, mesh: ProcMesh, procs_record: SpawnedProcs, hosts: HostMesh | HostSource | None, timeout: float
    ) -> Healed:
        began = time.monotonic()
        system = self._system
        node = system.node
        healed = Healed(mesh.name)
        base = mesh._shape.ranks()
        whole = mesh._whole()
        names: dict[str, None] = {}
        restored: dict[str, None] = {}
        deadline = began + timeout
        gone: set[str] = set()
        while True:
            dead = {rank: ref for rank, ref in zip(base, mesh._target().procs, strict=True) if ref.id in node.deaths}
            agents = self._places(mesh, procs_record, dead, hosts, deadline - time.monotonic(), gone)
            new: dict[int, ProcRef] = {}
            try:
                self._start(whole, procs_record, agents, new, deadline)
                # This process's own actors first, so that no process finds a successor without its actors.
                for rank, ref in new.items():
                    self._respawn_all(dead[rank].id, ref, names, restored, deadline)
                break
            except BaseException as e:
                for ref in new.values():
                    self._discard(ref)
                # The death of a rank may be reported before that of its host: the successor was then sent to a lost
                # host.
                lost = {agent.id for agent in agents.values() if self._is_gone(agent, new.values())}
                if not isinstance(e, Exception) or not lost or time.monotonic() > deadline:
                    raise
                gone |= lost
        # Not earlier: an attempt that fails leaves its spare hosts to the next.
        used = {agent.id for agent in agents.values()}
        procs_record.spares = [agent for agent in procs_record.spares if agent.id not in used]
        for rank, ref in new.items():
            old = dead[rank]
            death = node.deaths[old.id]
            node.replaced(old.id, ref)
            system.tree.replaced(old.id, ref)
            healed.replaced.append(
                Replacement(
                    rank,
                    dict(whole.extent.point(rank)),
                    "proc",
                    death.cause,
                    ref.host,
                    node.pids.get(ref.id, 0),
                    old.host,
                    death.pid or node.pids.get(old.id, 0),
                )
            )
        self._announce([(dead[rank].id, ref) for rank, ref in new.items()], whole, deadline)
        healed.replaced += self._revive(whole, mesh, names, restored, deadline)
        healed.respawned, healed.restored = list(names), list(restored)
        healed.seconds = time.monotonic() - began
        self.noted(whole._mesh_uid)
        system.changed()
        return healed

    def _is_gone(self, agent: ProcRef, successors: Iterable[ProcRef]) -> bool:
        """Return whether a host agent has died, or ends its host with the successors there."""
        deaths = self._system.node.deaths
        ended = [deaths[ref.id].kind for ref in successors if ref.agent == agent.id and ref.id in deaths]
        return agent.id in deaths or DeathKind.HOST_ENDING in ended

    def _start(
        self,
        whole: ProcMesh,
        procs_record: SpawnedProcs,
        agents: dict[int, ProcRef],
        new: dict[int, ProcRef],
        deadline: float,
    ) -> None:
        """Start successors with these agents, record them in ``new``, and wait for their bootstrap."""
        node = self._system.node
        messages: list[tuple[ProcRef, SpawnProcs]] = []
        for rank, agent in agents.items():
            procs_record.incarnations[rank] = number = procs_record.incarnations.get(rank, 1) + 1
            proc = f"{whole._mesh_uid}.{rank}~{number}"
            ref = agent.beside(proc, os.path.join(os.path.dirname(agent.address), proc + ".sock"))
            template, at = procs_record.messages[rank]
            message = msgspec.structs.replace(
                template,
                procs=[ProcSpec(ref.id, ref.address, rank)],
                per_proc=template.per_proc[at : at + 1],
                binds=template.binds[at : at + 1],
                slots=template.slots[at : at + 1],
            )
            new[rank] = ref
            messages.append((agent, message))
            if agent.site == node.ref.site:
                node.expect(ref)
        procs = tuple(new.get(rank, ref) for rank, ref in enumerate(whole._target().procs))
        target = Target(whole.name, whole._mesh_uid, whole.extent, procs, self._system.reported)
        calls: list[Future[object]] = []
        body, buffers = procs_record.bootstrap
        for (agent, message), (rank, ref) in zip(messages, new.items(), strict=True):
            node.learn(agent)
            if not node.send(agent.id, message):
                node.declare_dead(ref.id, node.deaths[agent.id])
            elif agent.site != node.ref.site:
                node.expect(ref)  # not earlier: its agent must know the proc first
            call = OneCall(node, f"{whole.name}.setup", target, rank)
            calls.append(call)
            extent = whole.extent
            if not node.send(ref.id, Bootstrap(call._number, rank, extent.names, extent.shape, buffers), body):
                call.on_peer_dead(ref.id, node.deaths[ref.id])
        gathered(node.poller, calls, f"{whole.name}.setup").get(max(0.0, deadline - time.monotonic()))

    def _discard(self, ref: ProcRef) -> None:
        """Kill a successor, as the heal failed."""
        self._system.tree.ending([ref.id])
        if ref.id not in self._system.node.deaths:
            ask_agent(
                self._system.node, ref.agent_ref(), "discard", KillProcs, [ref.id], "its mesh could not be healed"
            )

    def _places(
        self,
        mesh: ProcMesh,
        procs_record: SpawnedProcs,
        dead: dict[int, ProcRef],
        hosts: HostMesh | HostSource | None,
        timeout: float,
        gone: set[str],
    ) -> dict[int, ProcRef]:
        """Return the host agent for the successor of each dead proc: on the same host if it lives, else on a spare
        host.

        Args:
            gone: agents that end.
        """
        system = self._system
        node = system.node
        source = procs_record.source
        if isinstance(hosts, HostSource):
            source = procs_record.source = hosts
        elif hosts is not None:
            given = [host.agent for host in hosts._selected()]
            procs_record.spares = given + [agent for agent in procs_record.spares if agent not in given]
        spares = [agent for agent in procs_record.spares if agent.id not in node.deaths and agent.id not in gone]
        moved: dict[str, ProcRef] = {}
        places: dict[int, ProcRef] = {}
        lost: dict[str, list[int]] = {}
        wanted: dict[str, list[int]] = {}  # by the agents that the source replaces: their ranks
        for rank, ref in dead.items():
            ending = node.deaths[ref.id].kind is DeathKind.HOST_ENDING
            if ref.agent not in node.deaths and not ending and ref.agent not in gone:
                places[rank] = ref.agent_ref()
                continue
            agent = moved.get(ref.agent)
            if agent is None:
                agent = next((new for renew in self.renewers if (new := renew(ref.agent)) is not None), None)
            if agent is None and ref.agent in system.own_agents:
                agent = system.ensure_agent()
            if agent is None and spares:
                agent = spares.pop(0)
            if agent is None and source is not None:
                wanted.setdefault(ref.agent, []).append(rank)
                continue
            if agent is None and system.is_root and ref.site == node.ref.site:
                agent = system.ensure_agent()  # the dead agent was a worker of this machine, which is still up
            if agent is None:
                lost.setdefault(ref.host, []).append(rank)
                continue
            moved[ref.agent] = agent
            places[rank] = agent
        if wanted:
            assert source is not None
            try:
                new = source.replacements(list(wanted), timeout)
            except RuntimeError as e:
                names = ", ".join(dict.fromkeys(dead[ranks[0]].host for ranks in wanted.values()))
                raise HealError(
                    f"{mesh.name} cannot be healed: {names} is gone, and there is no replacement: {e}"
                ) from e
            for ranks, host in zip(wanted.values(), new._selected(), strict=True):
                places.update(dict.fromkeys(ranks, host.agent))
        if lost:
            what = "; ".join(f"{host} is gone (ranks {', '.join(map(str, r))})" for host, r in lost.items())
            raise HealError(
                f"{mesh.name} cannot be healed: {what}, and there is no spare host: give heal(hosts=...) one, or go on "
                "with mesh.healthy()"
            )
        return places

    # -- actors -------------------------------------------------------------------------------------

    def _respawn_all(
        self, old: str, ref: ProcRef, names: dict[str, None], restored: dict[str, None], deadline: float
    ) -> None:
        """Recreate all actors that this process owns on ``old`` on ``ref``."""
        waiting: list[tuple[SpawnedActors, int, OneCall]] = []
        for actors_record in list(self.spawned_actors.values()):
            for rank, proc in enumerate(actors_record.mesh._target().procs):
                if proc.id == old:
                    waiting.append((actors_record, rank, self._create(actors_record, rank, ref)))
        self._finish(waiting, ref, names, restored, deadline)

    def _finish(
        self,
        waiting: list[tuple[SpawnedActors, int, OneCall]],
        ref: ProcRef,
        names: dict[str, None],
        restored: dict[str, None],
        deadline: float,
    ) -> None:
        for actors_record, rank, created in waiting:
            created.get(max(0.0, deadline - time.monotonic()))
            if not actors_record.mesh._spec.tool:  # users do not know tools
                names[actors_record.mesh._name] = None
            if self._restore(actors_record, rank, ref, deadline):
                restored[actors_record.mesh._name] = None

    def _create(self, actors_record: SpawnedActors, rank: int, ref: ProcRef) -> OneCall:
        node = self._system.node
        mesh = actors_record.mesh
        target = self._target_with(mesh, rank, ref)
        call = OneCall(node, f"{mesh._name}.__init__", target, rank)
        extent = target.extent
        create = Create(
            mesh._actor,
            mesh._name,
            call._number,
            rank,
            extent.names,
            extent.shape,
            actors_record.owner,
            node.ref,
            actors_record.buffers,
        )
        give(actors_record.ports, target, [rank])
        if not node.send(ref.id, create, actors_record.body):
            call.on_peer_dead(ref.id, node.deaths[ref.id])
        return call

    def _target_with(self, mesh: ActorMesh[object], rank: int, ref: ProcRef) -> Target:
        current = mesh._target()
        procs = (*current.procs[:rank], ref, *current.procs[rank + 1 :])
        return Target(mesh._name, mesh._actor, current.extent, procs, self._system.reported)

    def _restore(self, actors_record: SpawnedActors, rank: int, ref: ProcRef, deadline: float) -> bool:
        """Restore a new actor from the last checkpoint of its predecessor, if there is one."""
        mesh = actors_record.mesh
        kept = self.checkpoints.get((mesh._actor, rank))
        if kept is None or not hasattr(mesh._cls, "__restore__"):
            return False
        node = self._system.node
        target = self._target_with(mesh, rank, ref)
        body, buffers = dumps(((loads(*kept),), {}))
        call = OneCall(node, f"{mesh._name}.__restore__", target, rank)
        extent = target.extent
        message = Call(
            mesh._actor, "__restore__", call._number, rank, extent.names, extent.shape, actors_record.owner, buffers
        )
        if not node.send(ref.id, message, body):
            call.on_peer_dead(ref.id, node.deaths[ref.id])
        call.get(max(0.0, deadline - time.monotonic()))
        return True

    def _revive(
        self,
        whole: ProcMesh,
        mesh: ProcMesh,
        names: dict[str, None],
        restored: dict[str, None],
        deadline: float,
    ) -> list[Replacement]:
        """Recreate actors that died in processes that are still alive."""
        tree = self._system.tree
        node = self._system.node
        ended = self._ended(mesh, deadline)
        where = {ref.id: rank for rank, ref in zip(mesh._shape.ranks(), mesh._target().procs, strict=True)}
        revived: list[Replacement] = []
        for actors_record in list(self.spawned_actors.values()):
            actor = actors_record.mesh._actor
            for rank, ref in enumerate(actors_record.mesh._target().procs):
                cause = ended.get((ref.id, actor))
                if cause is None or ref.id not in where:
                    continue
                self._finish(
                    [(actors_record, rank, self._create(actors_record, rank, ref))], ref, names, restored, deadline
                )
                tree.revived(actor, [rank])
                at = where[ref.id]
                pid = node.pids.get(ref.id, 0)
                revived.append(
                    Replacement(at, dict(whole.extent.point(at)), "actor", cause, ref.host, pid, ref.host, pid)
                )
        return revived

    def _ended(self, mesh: ProcMesh, deadline: float) -> dict[tuple[str, str], str]:
        """Explain why actors of this process in living procs of a mesh have ended, by proc and actor."""
        node = self._system.node
        target = mesh._target()
        on: dict[str, list[str]] = {}
        for actors_record in self.spawned_actors.values():
            for ref in actors_record.mesh._target().procs:
                on.setdefault(ref.id, []).append(actors_record.mesh._actor)
        asked: list[tuple[str, OneCall]] = []
        for rank, ref in enumerate(target.procs):
            if ref.id in on and ref.id not in node.deaths:
                call = OneCall(node, f"{mesh.name}.heal", target, rank)
                asked.append((ref.id, call))
                if not node.send(ref.id, AskEnded(call._number, rank, on[ref.id])):
                    call.on_peer_dead(ref.id, node.deaths[ref.id])
        ended: dict[tuple[str, str], str] = {}
        for proc, call in asked:
            try:
                causes: dict[str, str] = call.get(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise
            except Exception as e:  # the proc died in the meantime, which the next heal repairs
                log.debug("while asking for ended actors: %s", e)
                continue
            ended.update({(proc, actor): cause for actor, cause in causes.items()})
        return ended

    def _on_ask_ended(self, link: MessageLink, message: AskEnded, _body: Body) -> None:
        system = self._system
        causes: dict[str, str] = {}
        for name in message.actors:
            actor = system.actors.get(name)
            death = actor.death if actor is not None else system.ended.get(name)
            if death is not None:
                causes[name] = death.cause
        acknowledge(link, message.call, message.rank, causes)

    # -- announcing successors ------------------------------------------------------------------------

    def _announce(self, replaced: list[tuple[str, ProcRef]], whole: ProcMesh, deadline: float) -> None:
        """Announce successors to the root and the procs of the mesh; wait until they have recreated their actors."""
        if not replaced:
            return
        system = self._system
        node = system.node
        if system.is_root:
            for proc, ref in replaced:
                self._spread(proc, ref, node.id)
        target = whole._target()
        told = [(target, rank) for rank in range(len(target.procs))]
        if not system.is_root:
            told.append((Target("the root", system.root.id, SINGLE, (system.root,), system.reported), 0))
        fresh = {ref.id for _, ref in replaced}
        waiting: list[OneCall] = []
        for to, rank in told:
            peer = to.procs[rank].id
            if peer == node.id or peer in fresh or peer in node.deaths:
                continue
            for proc, ref in replaced:
                call = OneCall(node, f"{whole.name}.heal", to, rank)
                waiting.append(call)
                if not node.send(peer, Replaced(call._number, rank, proc, ref)):
                    call.on_peer_dead(peer, node.deaths[peer])
        for call in waiting:
            try:
                call.get(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise
            except Exception as e:  # another proc died in the meantime, which the next heal repairs
                log.debug("while telling of successors: %s", e)

    def _spread(self, proc: str, ref: ProcRef, sender: str) -> None:
        """At the root: forward a successor to every linked process, and to those that asked."""
        node = self._system.node
        peers = {peer for peer, link in node.links.items() if link.attached} | self._askers.pop(proc, set())
        agents = {known.agent for known in node.refs.values()}
        for peer in peers - {node.id, sender, ref.id} - agents:
            if peer not in node.deaths:
                node.send(peer, Replaced(0, 0, proc, ref))

    def _on_replaced(self, link: MessageLink, message: Replaced, _body: Body) -> None:
        system = self._system
        node = system.node
        node.learn(message.ref)
        mine = [
            (actors_record, rank)
            for actors_record in self.spawned_actors.values()
            for rank, proc in enumerate(actors_record.mesh._target().procs)
            if proc.id == message.proc
        ]
        if not node.replaced(message.proc, message.ref):
            if message.call:
                acknowledge(link, message.call, message.rank)
            return
        system.tree.replaced(message.proc, message.ref)
        if system.is_root:
            self._spread(message.proc, message.ref, link.peer)
        calls: list[Future[object]] = [self._create(actors_record, rank, message.ref) for actors_record, rank in mine]

        def done(_all: Future[object]) -> None:
            if message.call:
                acknowledge(link, message.call, message.rank)

        if not calls:
            done(Future(node.poller, ""))
            return

        def restore() -> None:
            for (actors_record, rank), call in zip(mine, calls, strict=True):
                try:
                    call.get(TIMEOUT)
                    self._restore(actors_record, rank, message.ref, time.monotonic() + TIMEOUT)
                except Exception as e:
                    log.warning("%s could not be made again on %s: %s", actors_record.mesh._name, message.ref.id, e)
            done(calls[0])

        threading.Thread(target=restore, name="monarch-heal", daemon=True).start()

    def ask_root(self, proc: str) -> None:
        """Ask the root for the successor of a dead proc."""
        system = self._system
        if not system.is_root and proc != system.root.id and system.root.id not in system.node.deaths:
            system.node.send(system.root.id, AskReplaced(proc))

    def _on_ask(self, link: MessageLink, message: AskReplaced, _body: Body) -> None:
        successor = self._system.node.successors.get(message.proc)
        if successor is not None:
            link.send(encode_header(Replaced(0, 0, message.proc, successor)))
        else:
            self._askers.setdefault(message.proc, set()).add(link.peer)

    # -- automatic restarts -----------------------------------------------------------------------------

    def takes_over(self, proc: str, death: Death, give_up: Callable[[str], None]) -> bool:
        """Return whether a restart policy replaces this proc now, so that its death is not reported yet.

        Args:
            give_up: called with a reason if the replacement fails.
        """
        if death.kind.intended:
            return False
        mesh = self._mesh_of(proc)
        if mesh is None:
            return False
        delay = self.restarts.failed(mesh._mesh_uid, time.monotonic())
        if delay is None:
            return False
        policy = self.restarts.policy(mesh._mesh_uid)
        assert policy is not None

        def ended(future: Future[Healed]) -> None:
            error = future.exception()
            if error is not None:
                give_up(f"it could not be restarted: {error}")
            else:
                log.info("%s", future.get())

        def restart() -> None:
            if self._system._closed or mesh._stopped:
                return
            if policy.scope == "all":
                living = [ref for ref in mesh._target().procs if ref.id not in self._system.node.deaths]
                if living:
                    mesh.kill("all ranks of its mesh are restarted together").add_done_callback(lambda _f: heal())
                    return
            heal()

        def heal() -> None:
            try:
                self.heal(mesh, None, TIMEOUT).add_done_callback(ended)
            except HealError as e:
                give_up(str(e))

        self._system.node.poller.call_later(delay, restart)
        self._system.node.poller.start_background()
        return True

    def _mesh_of(self, proc: str) -> ProcMesh | None:
        for mesh in self._system.proc_meshes.values():
            if self.restarts.policy(mesh._mesh_uid) is not None and any(r.id == proc for r in mesh._target().procs):
                return mesh
        return None


def _flat(body: Any) -> bytes:
    return b"".join(body) if type(body) is list else bytes(body)


class HeldCalls:
    """The calls of this process that wait for a heal, as calls after ``spawn`` wait for the spawn.

    A call over a dead rank fails at once. If ``heal()`` is replacing the rank, this process holds the call, and sends
    it to the rank's successor when the heal is over. If the heal fails, the call fails as it would have without the
    heal. Calls of one process stay in order: a call over a rank that an earlier held call addresses waits, too.
    """

    def __init__(self) -> None:
        #: Whether callers need to call ``keep`` at all.
        self.active = False
        # Reentrant: a call to this process itself may make further calls.
        self._lock = threading.RLock()
        self._healing: dict[str, int] = {}
        self._kept: list[tuple[frozenset[str], Callable[[], None]]] = []

    def begin(self, procs: Iterable[str]) -> None:
        """Begin to hold calls over these procs, because they or actors on them are being replaced."""
        with self._lock:
            for proc in procs:
                self._healing[proc] = self._healing.get(proc, 0) + 1
            self.active = bool(self._healing or self._kept)

    def keep(self, procs: Iterable[str], send: Callable[[], None]) -> bool:
        """Hold a call to these procs if it must wait, and return whether it does. If so, ``send`` is called later."""
        wanted = frozenset(procs)
        with self._lock:
            if not self._must_wait(wanted, self._kept):
                return False
            context = copy_context()
            context.run(origin.set, calling_origin())
            self._kept.append((wanted, lambda: context.run(send)))
            return True

    def end(self, procs: Iterable[str]) -> None:
        """Send the calls that waited for the heal of these procs, which is over, successful or not."""
        with self._lock:
            for proc in procs:
                self._healing[proc] -= 1
                if not self._healing[proc]:
                    del self._healing[proc]
            kept, self._kept = self._kept, []
            still: list[tuple[frozenset[str], Callable[[], None]]] = []
            for wanted, send in kept:
                if self._must_wait(wanted, still):
                    still.append((wanted, send))
                else:
                    send()
            self._kept = [*still, *self._kept]
            self.active = bool(self._healing or self._kept)

    def _must_wait(self, wanted: frozenset[str], before: list[tuple[frozenset[str], Callable[[], None]]]) -> bool:
        return not wanted.isdisjoint(self._healing) or any(not wanted.isdisjoint(earlier) for earlier, _ in before)
