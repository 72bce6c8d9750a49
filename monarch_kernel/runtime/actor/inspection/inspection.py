"""What tools that look into running meshes need of the runtime; the tools are loaded by name, when asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monarch_kernel.runtime.actor import extensions
from monarch_kernel.runtime.actor.context import calling_cell, current
from monarch_kernel.runtime.actor.execution import postmortem


class Inspectable:
    """The debugger as methods of a proc mesh; ``monarch_kernel.debug`` has the same as functions, and says more."""

    def dead(self: Any) -> dict[int, str]:
        """The ranks of which this process knows that they have died, and why; asks nobody."""
        deaths = self._system.node.deaths
        if not deaths:
            return {}
        return {rank: deaths[ref.id].cause for rank, ref in enumerate(self._target().procs) if ref.id in deaths}

    def stacks(self, **options: Any) -> Any:
        """The Python stacks of all ranks, merged; see ``monarch_kernel.debug.stacks``."""
        return extensions.debugger_functions().stacks(self, **options)

    def diff(self, expression: str, **options: Any) -> Any:
        """The distinct values of an expression over the ranks; see ``monarch_kernel.debug.diff``."""
        return extensions.debugger_functions().diff(self, expression, **options)

    def pull(self, expression: str, **options: Any) -> Any:
        """The value of an expression on one rank; see ``monarch_kernel.debug.pull``."""
        return extensions.debugger_functions().pull(self, expression, **options)

    def hang(self, **options: Any) -> Any:
        """Why these ranks do not go on; see ``monarch_kernel.debug.hang``."""
        return extensions.debugger_functions().hang(self, **options)

    @property
    def debug(self) -> Any:
        """The ranks of this mesh that are stopped, to step and to look into; a ``monarch_kernel.debug.StopSet``."""
        return extensions.debugger_functions().select(self)


@dataclass(frozen=True, slots=True)
class Whole:
    """A proc mesh as it was spawned, and which of its ranks something is on.

    Attributes:
        procs: the mesh.
        ranks: for each rank of what was asked for, its rank there.
        uid: names the mesh in all processes.
    """

    procs: Any
    ranks: tuple[int, ...]
    uid: str


def whole_of(mesh: Any) -> Whole:
    """The proc mesh that ``mesh`` is, or is a slice of, or (an actor mesh) was spawned on.

    Raises:
        TypeError: it is neither.
        LookupError: these actors' proc mesh is not known in this process.
    """
    from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
    from monarch_kernel.runtime.mesh.shape import Extent, Region

    if isinstance(mesh, ProcMesh):
        procs = mesh._whole()
        if procs is mesh and mesh._region.nelements != len(mesh._procs):
            # A slice that came from another process: its shape as spawned is not known here.
            flat = Region.from_extent(Extent(("ranks",), (len(mesh._procs),)))
            procs = ProcMesh(mesh._system, mesh._uid, mesh.name, mesh._procs, flat, mesh._host_region)
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
    return Whole(procs, tuple(places[ref.id] for ref in mesh._target().procs), procs._uid)


def hosts_of(procs: Any) -> list[str]:
    """The name of each rank's host."""
    return [ref.host for ref in procs._target().procs]


def home() -> Any:
    """The proc mesh of the actor that runs here, or of any actor of this process; None where there is none."""
    from monarch_kernel.runtime.actor.system import get_system

    here = current.get()
    mesh = here.actor_instance.proc_mesh if here is not None else None
    if mesh is None:
        for instance in list(get_system().actors.values()):
            mesh = mesh or getattr(instance, "proc_mesh", None)
    return mesh


def running_here() -> tuple[str, str, str]:
    """The actor, its endpoint, and the cell, on whose behalf the calling thread or task runs; "" for none."""
    here = current.get()
    if here is None:
        return "", "", calling_cell()
    return here.actor_instance.name, here._endpoint, calling_cell()


def actors_here(actor: str = "") -> dict[str, Any]:
    """The objects of the actors of this process, by the unique name of their mesh; of one mesh, if that is given.

    They are used by their own threads meanwhile: nothing is locked.
    """
    from monarch_kernel.runtime.actor.system import get_system

    found = get_system().actors.items()
    return {uid: instance.object for uid, instance in found if hasattr(instance, "object") and actor in ("", uid)}


def debug_controller() -> Any:
    """The actor of the controller that hears of stopped ranks; ``monarch_kernel.debug`` is what to use."""
    return extensions.debug_hub().hub_actor()


def keep_failure(error: BaseException, cell: str) -> None:
    """A tool's endpoint has caught what the user's code raised: keep it as that of an endpoint would be."""
    from monarch_kernel.runtime.actor.system import get_system

    name, endpoint, _ = running_here()
    postmortem.failed(error, name, endpoint, cell, get_system().node.poller.call_later)


def on_failure(callback: Any) -> None:
    """Have ``callback(error)`` called where an endpoint or a cell fails, before anybody is told; None ends that."""
    postmortem.on_failure = callback


failures = postmortem.failures
