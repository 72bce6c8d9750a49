""""""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from monarch_kernel.protocol.messages import Death, ProcRef
from monarch_kernel.runtime.mesh.shape import Extent

# Track the meshes that this process has spawned and their owners, and find the owners to notify of a death.
#
# Pure: its input is events (a spawn, a stop, a death), its output is notices. The actor system sends the notices and
# calls ``__supervise__``.


class OwnedMesh(msgspec.Struct):
    """The spawner's record of a mesh of actors or procs.

    Attributes:
        id: a unique id.
        name: the name as spawned, for messages.
        owner: id of the actor that spawned it.
        extent: its shape as spawned; ranks here are ranks in it.
        procs: the proc of each rank.
        tool: whether it is internal: deaths of its actors are reported as deaths of their procs, and deaths of its own
            procs only to pending calls.
        cls: the class of its actors, for messages; "" for procs.
        dead: the ranks whose death was already reported.
    """

    id: str
    name: str
    owner: str
    extent: Extent
    procs: tuple[ProcRef, ...]
    tool: bool = False
    cls: str = ""
    stopped: bool = False
    dead: set[int] = msgspec.field(default_factory=set[int])


class Notice(msgspec.Struct, frozen=True):
    """A notice to the owner of ``mesh`` that these ranks died.

    ``key`` identifies the event: a pending call that has already raised it marks the same key as reported.
    """

    mesh: OwnedMesh
    ranks: list[int]
    death: Death
    key: object


class Tree:
    """The part of the supervision tree below one process."""

    def __init__(self) -> None:
        self._actors: dict[str, OwnedMesh] = {}
        self._procs: dict[str, OwnedMesh] = {}
        self._on_proc: dict[str, list[OwnedMesh]] = {}
        self._of_proc: dict[str, list[OwnedMesh]] = {}
        self._ending: set[str] = set()

    def spawned_actors(self, mesh: OwnedMesh) -> None:
        """Add an actor mesh spawned by an actor (or the client) of this process."""
        self._actors[mesh.id] = mesh
        _index(self._on_proc, mesh)

    def spawned_procs(self, mesh: OwnedMesh) -> None:
        """Add a proc mesh spawned by an actor (or the client) of this process."""
        self._procs[mesh.id] = mesh
        _index(self._of_proc, mesh)

    def stopped(self, mesh_id: str) -> None:
        """Drop a mesh that was stopped on request: the ends of its ranks are not failures."""
        for known, index in ((self._actors, self._on_proc), (self._procs, self._of_proc)):
            mesh = known.pop(mesh_id, None)
            if mesh is not None:
                mesh.stopped = True
                for proc in {ref.id for ref in mesh.procs}:
                    index[proc].remove(mesh)
                    if not index[proc]:
                        del index[proc]

    def ending(self, procs: Iterable[str]) -> None:
        """Record that this process has requested the end of these procs, which then is no failure here."""
        self._ending.update(procs)

    def replaced(self, proc: str, ref: ProcRef) -> None:
        """Put a dead proc's successor, with its recreated actors, in its place: it may die again."""
        for index in (self._on_proc, self._of_proc):
            for mesh in index.pop(proc, ()):
                ranks = [rank for rank, known in enumerate(mesh.procs) if known.id == proc]
                mesh.procs = tuple(ref if known.id == proc else known for known in mesh.procs)
                mesh.dead.difference_update(ranks)
                index.setdefault(ref.id, []).append(mesh)

    def revived(self, mesh_id: str, ranks: Iterable[int]) -> None:
        """Record that actors that had died in living procs were recreated."""
        mesh = self._actors.get(mesh_id)
        if mesh is not None:
            mesh.dead.difference_update(ranks)

    def failed_on(self) -> set[str]:
        """Return the procs on which an actor spawned here has died."""
        return {mesh.procs[rank].id for mesh in self._actors.values() for rank in mesh.dead}

    def actor_failed(self, mesh_id: str, rank: int, death: Death) -> list[Notice]:
        """Record that one actor of a mesh died in a living proc."""
        mesh = self._actors.get(mesh_id)
        if mesh is None or rank in mesh.dead:
            return []
        mesh.dead.add(rank)
        return [Notice(mesh, [rank], death, (mesh_id, mesh.procs[rank].id))]

    def proc_died(self, proc: str, death: Death) -> list[Notice]:
        """Record the end of a proc. Notify the owners of its actor meshes, or its proc mesh's owner if it has none.

        Tool meshes do not count. A proc that was stopped or killed on request has not failed.
        """
        asked = proc in self._ending
        self._ending.discard(proc)
        if death.kind.intended or asked:
            return []
        on_it = [mesh for mesh in self._on_proc.get(proc, []) if not mesh.tool]
        return [
            Notice(mesh, ranks, death, proc)
            for mesh in on_it or self._of_proc.get(proc, [])
            if not mesh.tool and (ranks := _newly_dead(mesh, proc))
        ]


def _index(index: dict[str, list[OwnedMesh]], mesh: OwnedMesh) -> None:
    for proc in {ref.id for ref in mesh.procs}:
        index.setdefault(proc, []).append(mesh)


def _newly_dead(mesh: OwnedMesh, proc: str) -> list[int]:
    ranks = [rank for rank, ref in enumerate(mesh.procs) if ref.id == proc and rank not in mesh.dead]
    mesh.dead.update(ranks)
    return ranks


# Decide when a mesh with failed ranks restarts automatically. Pure: times in, decisions out.

WHEN = ("never", "on_failure")
SCOPES = ("rank", "all")


class RestartPolicy(msgspec.Struct, frozen=True):
    """The automatic reaction to dead procs of a mesh.

    Attributes:
        when: "on_failure": replace them; "never": report the failure to their owner.
        limit: the maximum number of restarts within ``within`` seconds; the next failure is reported to the owner.
        backoff: seconds before the first restart; doubled for each further one, up to ``backoff_max``.
        scope: "rank": restart only the dead ranks; "all": restart all ranks of the mesh together, as for a training job
            that has lost its process group.
    """

    when: str = "on_failure"
    limit: int = 3
    within: float = 60.0
    backoff: float = 0.0
    backoff_max: float = 30.0
    scope: str = "rank"

    def __post_init__(self) -> None:
        if self.when not in WHEN:
            raise ValueError(f"restart={self.when!r}: use one of {', '.join(map(repr, WHEN))}")
        if self.scope not in SCOPES:
            raise ValueError(f"scope={self.scope!r}: use one of {', '.join(map(repr, SCOPES))}")
        if self.limit < 1 or self.within <= 0 or self.backoff < 0 or self.backoff_max < 0:
            raise ValueError(f"{self}: limit must be at least 1, within more than 0, and no wait negative")


#: Deaths within this time count as one event, such as a host that dies with its ranks (seconds).
TOGETHER = 0.5


class Restarts:
    """The restarts of each mesh so far."""

    def __init__(self) -> None:
        self._policies: dict[str, RestartPolicy] = {}
        self._times: dict[str, deque[float]] = {}
        self._pending: dict[str, float] = {}

    def add(self, mesh: str, policy: RestartPolicy) -> None:
        """Set the policy of a mesh."""
        if policy.when != "never":
            self._policies[mesh] = policy
            self._times[mesh] = deque()

    def remove(self, mesh: str) -> None:
        """Remove the policy of a mesh that has ended."""
        for known in (self._policies, self._times, self._pending):
            known.pop(mesh, None)

    def policy(self, mesh: str) -> RestartPolicy | None:
        """Return the policy of a mesh; None if it is never restarted."""
        return self._policies.get(mesh)

    def failed(self, mesh: str, now: float) -> float | None:
        """Record a proc's death. Return the delay before the restart (seconds), or None if there is no restart."""
        policy = self._policies.get(mesh)
        if policy is None:
            return None
        times = self._times[mesh]
        while times and now - times[0] > policy.within:
            times.popleft()
        if times and now - times[-1] <= TOGETHER:
            return self._pending.get(mesh, policy.backoff)
        if len(times) >= policy.limit:
            return None
        delay = min(policy.backoff * 2 ** len(times), policy.backoff_max)
        times.append(now)
        self._pending[mesh] = delay
        return delay


# Track the known senders of a port for its receiver, and detect when none is left. Pure: its input is events.


class Sender(msgspec.Struct, frozen=True):
    """An actor, or a process, that was given a port.

    Attributes:
        proc: the process.
        actor: the actor there; "" for any code in that process.
        mesh, rank, extent: its position in its mesh, for messages.
    """

    proc: ProcRef
    actor: str
    mesh: str
    rank: int
    extent: Extent


class Senders:
    """The senders of one port.

    The port is lost when no sender has it any more and at least one sender died with it. If all live senders have
    released it, nothing more will be sent. If an unknown sender might have it, it is never lost.
    """

    def __init__(self) -> None:
        self._living: dict[tuple[str, str], Sender] = {}
        self._copies: dict[tuple[str, str], int] = {}
        self._gone: dict[tuple[str, str], tuple[Sender, Death]] = {}
        self._unknown = False

    def given(self, senders: Iterable[Sender]) -> None:
        """Record that each of these senders gets a copy of the port."""
        for sender in senders:
            key = (sender.proc.id, sender.actor)
            self._gone.pop(key, None)
            self._living[key] = sender
            self._copies[key] = self._copies.get(key, 0) + 1

    def given_to_unknown(self) -> None:
        """Record that unknown senders may have the port, so that no death can end it any more."""
        self._unknown = True

    def let_go(self, proc: str, actor: str) -> bool:
        """Record that an actor has released one of its copies. Return the same as ``ended``."""
        key = (proc, actor)
        if key not in self._living:
            return False
        self._copies[key] -= 1
        if self._copies[key]:
            return False
        del self._living[key], self._copies[key]
        return bool(self.lost)

    def ended(self, gone: Callable[[Sender], bool], death: Death) -> bool:
        """Record that these senders have died or were stopped. Return whether the port is lost now."""
        found = [key for key, sender in self._living.items() if gone(sender)]
        for key in found:
            del self._copies[key]
            self._gone[key] = (self._living.pop(key), death)
        return bool(found) and bool(self.lost)

    @property
    def lost(self) -> list[tuple[Sender, Death]]:
        """The senders that died with the port, if no other sender has it; empty while one may still send."""
        return [] if self._unknown or self._living else list(self._gone.values())
