"""Track the meshes that this process has spawned and their owners, and find the owners to notify of a death.

Pure: its input is events (a spawn, a stop, a death), its output is notices. The actor system sends the notices and
calls ``__supervise__``.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from monarch_kernel.protocol.messages import Death, ProcRef
from monarch_kernel.runtime.mesh.shape import Extent


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

    def owned_by(self, owner: str) -> list[OwnedMesh]:
        """Return the meshes that an actor owns, oldest first."""
        return [mesh for known in (self._procs, self._actors) for mesh in known.values() if mesh.owner == owner]

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
