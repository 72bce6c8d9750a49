"""Which meshes this process has spawned, which actors own them, and which owners a death concerns.

Pure: events go in (a spawn, a stop, a death), and notices come out. The actor system sends them, and calls
``__supervise__``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from monarch_kernel.protocol.messages import Death, DeathKind, ProcRef
from monarch_kernel.runtime.mesh.shape import Extent


@dataclass(slots=True)
class OwnedMesh:
    """A mesh (of actors or of procs) as its spawner remembers it.

    Attributes:
        id: unique.
        name: as spawned, for people.
        owner: id of the actor that spawned it.
        extent: its shape as spawned; ranks here are ranks in it.
        procs: the proc of each rank.
        tool: not the user's: its deaths are reported as those of the procs it is on.
        cls: the class of its actors, for people; "" for procs.
        dead: ranks whose death was told already.
    """

    id: str
    name: str
    owner: str
    extent: Extent
    procs: tuple[ProcRef, ...]
    tool: bool = False
    cls: str = ""
    stopped: bool = False
    dead: set[int] = field(default_factory=set[int])


@dataclass(frozen=True, slots=True)
class Notice:
    """Tell the owner of ``mesh`` that these of its ranks died.

    ``key`` names the event: a pending call that has raised it already has marked the same key as reported.
    """

    mesh: OwnedMesh
    ranks: list[int]
    death: Death
    key: object


class Tree:
    """The part of the supervision tree that hangs below one process."""

    def __init__(self) -> None:
        self._actors: dict[str, OwnedMesh] = {}
        self._procs: dict[str, OwnedMesh] = {}
        self._on_proc: dict[str, list[OwnedMesh]] = {}
        self._of_proc: dict[str, list[OwnedMesh]] = {}
        self._ending: set[str] = set()

    def spawned_actors(self, mesh: OwnedMesh) -> None:
        """An actor mesh was spawned by an actor (or the client) of this process."""
        self._actors[mesh.id] = mesh
        _index(self._on_proc, mesh)

    def spawned_procs(self, mesh: OwnedMesh) -> None:
        """A proc mesh was spawned by an actor (or the client) of this process."""
        self._procs[mesh.id] = mesh
        _index(self._of_proc, mesh)

    def stopped(self, mesh_id: str) -> None:
        """The whole mesh was stopped on purpose: its ends are no failures, and it is forgotten."""
        for known, index in ((self._actors, self._on_proc), (self._procs, self._of_proc)):
            mesh = known.pop(mesh_id, None)
            if mesh is not None:
                mesh.stopped = True
                for proc in {ref.id for ref in mesh.procs}:
                    index[proc].remove(mesh)
                    if not index[proc]:
                        del index[proc]

    def ending(self, procs: Iterable[str]) -> None:
        """This process has asked for the end of these procs: that is not a failure here."""
        self._ending.update(procs)

    def replaced(self, proc: str, ref: ProcRef) -> None:
        """A dead proc of these meshes has a successor, with actors made anew: it may die again."""
        for index in (self._on_proc, self._of_proc):
            for mesh in index.pop(proc, ()):
                ranks = [rank for rank, known in enumerate(mesh.procs) if known.id == proc]
                mesh.procs = tuple(ref if known.id == proc else known for known in mesh.procs)
                mesh.dead.difference_update(ranks)
                index.setdefault(ref.id, []).append(mesh)

    def revived(self, mesh_id: str, ranks: Iterable[int]) -> None:
        """Actors of a mesh that had died in living procs were made anew."""
        mesh = self._actors.get(mesh_id)
        if mesh is not None:
            mesh.dead.difference_update(ranks)

    def failed_on(self) -> set[str]:
        """The procs on which an actor that was spawned here has died."""
        return {mesh.procs[rank].id for mesh in self._actors.values() for rank in mesh.dead}

    def owned_by(self, owner: str) -> list[OwnedMesh]:
        """What an actor owns, oldest first."""
        return [mesh for known in (self._procs, self._actors) for mesh in known.values() if mesh.owner == owner]

    def actor_failed(self, mesh_id: str, rank: int, death: Death) -> list[Notice]:
        """One actor of a mesh died in a living proc."""
        mesh = self._actors.get(mesh_id)
        if mesh is None or rank in mesh.dead:
            return []
        mesh.dead.add(rank)
        return [Notice(mesh, [rank], death, (mesh_id, mesh.procs[rank].id))]

    def proc_died(self, proc: str, death: Death) -> list[Notice]:
        """A proc ended. Its actor meshes' owners are told; where only tools were on it, the proc mesh's owner is.

        A proc that was stopped or killed on purpose has not failed.
        """
        asked = proc in self._ending
        self._ending.discard(proc)
        if death.kind is DeathKind.STOPPED or asked:
            return []
        on_it = [mesh for mesh in self._on_proc.get(proc, []) if not mesh.tool]
        return [
            Notice(mesh, ranks, death, proc)
            for mesh in on_it or self._of_proc.get(proc, [])
            if (ranks := _newly_dead(mesh, proc))
        ]


def _index(index: dict[str, list[OwnedMesh]], mesh: OwnedMesh) -> None:
    for proc in {ref.id for ref in mesh.procs}:
        index.setdefault(proc, []).append(mesh)


def _newly_dead(mesh: OwnedMesh, proc: str) -> list[int]:
    ranks = [rank for rank, ref in enumerate(mesh.procs) if ref.id == proc and rank not in mesh.dead]
    mesh.dead.update(ranks)
    return ranks
