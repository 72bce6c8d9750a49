"""How meshes were made, kept for whoever makes their procs and actors anew; and what that has done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from monarch_kernel.runtime.node.future import Future, nothing

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh
    from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh

#: How long the start of a successor, and every ``__init__`` and ``__restore__`` on it, may take (seconds).
HEAL_TIMEOUT = 60.0
#: Checkpoints of actors are kept for a next controller if they are not larger (bytes).
MAX_KEPT_CHECKPOINT = 64 * 1024 * 1024


class HealError(RuntimeError):
    """A mesh could not be healed, or not wholly; tells what is missing and why."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """One rank that was healed.

    Attributes:
        what: "proc", or "actor" if its process had lived on.
        cause: why the one before it had died.
    """

    rank: int
    coords: dict[str, int]
    what: str
    cause: str
    host: str
    pid: int
    old_host: str
    old_pid: int


@dataclass(slots=True)
class Healed:
    """What ``heal`` did.

    Attributes:
        replaced: one for each rank that was dead.
        respawned: names of the actor meshes that got new actors.
        restored: names of those whose actors were given a checkpoint.
        seconds: how long it took.
    """

    mesh: str
    replaced: list[Replacement] = field(default_factory=list[Replacement])
    respawned: list[str] = field(default_factory=list[str])
    restored: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.replaced)

    def __str__(self) -> str:
        if not self.replaced:
            return f"{self.mesh}: nothing to heal"
        lines = [f"{self.mesh}: {len(self.replaced)} healed in {self.seconds:.2f} s"]
        for one in self.replaced:
            where = " ".join(f"{k}={v}" for k, v in one.coords.items()) or "the only one"
            if one.what == "actor":
                lines.append(f"  rank {one.rank} ({where}): new actors in process {one.pid}; before: {one.cause}")
                continue
            moved = f"{one.old_host}/{one.old_pid} -> {one.host}/{one.pid}"
            lines.append(f"  rank {one.rank} ({where}): {moved}; before: {one.cause}")
        if self.respawned:
            lines.append(f"  actors made anew: {', '.join(self.respawned)}")
        if self.restored:
            lines.append(f"  restored from checkpoints: {', '.join(self.restored)}")
        return "\n".join(lines)


class Healable:
    """A handle of a mesh, which ``heal_mesh`` may have given."""

    _healed: Future[Healed] | None = None

    @property
    def healed(self) -> Healed:
        """What ``heal_mesh``, which gave this handle, has done; waits until it is done.

        Raises:
            HealError: it could not be done. RuntimeError: this handle did not come from ``heal_mesh``.
        """
        if self._healed is None:
            raise RuntimeError(f"{self!r} did not come from heal_mesh: what heal() did is in the future that it gives")
        return self._healed.get()


Mesh = TypeVar("Mesh", bound="ProcMesh | ActorMesh[Any]")


def heal_mesh(mesh: Mesh, hosts: HostMesh | None = None, timeout: float = HEAL_TIMEOUT) -> Mesh:
    """Replace what is dead of a proc mesh, or of the procs of an actor mesh. See ``ProcMesh.heal``.

    Returns:
        The healed mesh, to be used at once: calls on it wait for the heal. Await it, or ask for its ``healed``, the
        report, to know that all is there.

    Raises:
        HealError: this process has not spawned these procs. What else can go wrong, awaiting the mesh raises.
    """
    from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh

    if not isinstance(mesh, ProcMesh | ActorMesh):
        raise TypeError(f"heal_mesh takes a proc mesh or an actor mesh, not {type(mesh).__name__}")
    done = _procs_of(mesh).heal(hosts, timeout)
    again: Any = mesh._new_with_region(mesh._shape)
    again._healed = done
    again._ready = done.then(nothing)
    return again


def _procs_of(mesh: ProcMesh | ActorMesh[Any]) -> ProcMesh:
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh

    if isinstance(mesh, ProcMesh):
        return mesh
    mine = {ref.id for ref in mesh._target().procs}
    for procs in mesh._system.proc_meshes.values():
        if mine <= {ref.id for ref in procs._target().procs}:
            return procs
    raise HealError(f"the procs of {mesh._name} can be healed only in the process that spawned them")
