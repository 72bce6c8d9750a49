"""The target of a call: the ranks of a mesh, and what errors report about failed ranks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from monarch_kernel import environment
from monarch_kernel.protocol.faults import Fault
from monarch_kernel.protocol.messages import Death, ProcRef
from monarch_kernel.runtime.actor.error_text import Called
from monarch_kernel.runtime.actor.errors import RankFailure
from monarch_kernel.runtime.mesh.shape import Extent, Point
from monarch_kernel.runtime.node.node import Node

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.calls.caster import Caster, CastPlan
    from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh


class ReportedDeaths:
    """The deaths that calls of this process have encountered, by the keys of ``supervision.tree.Notice``.

    Attributes:
        met: a pending call failed because of the death, and its result will raise.
        raised: the result of such a call has raised.
    """

    __slots__ = ("met", "raised")

    def __init__(self) -> None:
        self.met: set[Hashable] = set()
        self.raised: set[Hashable] = set()


class Target:
    """The ranks that a call addresses: their procs, and names for errors. All calls of a mesh handle share it."""

    __slots__ = (
        "_mesh",
        "_of_tool",
        "_one_per_host",
        "_plan",
        "_planned",
        "actor",
        "by_proc",
        "extent",
        "mesh_name",
        "procs",
        "reported",
    )

    def __init__(
        self,
        mesh_name: str,
        actor: str,
        extent: Extent,
        procs: tuple[ProcRef, ...],
        reported: ReportedDeaths,
        mesh: ActorMesh[Any] | None = None,
    ) -> None:
        self.mesh_name = mesh_name
        self.actor = actor
        self.extent = extent
        self.procs = procs
        self.reported = reported
        self.by_proc: dict[str, list[int]] = {}
        for rank, ref in enumerate(procs):
            self.by_proc.setdefault(ref.id, []).append(rank)
        self._one_per_host: bool | None = None
        self._planned = False
        self._plan: CastPlan | None = None
        self._mesh = mesh  # the actor mesh; None for procs
        self._of_tool: bool | None = None

    @property
    def actor_class(self) -> str:
        """The name of the actors' class in errors; "" for procs."""
        return "" if self._mesh is None else self._mesh._class_label()

    @property
    def called(self) -> Called:
        """How errors name these ranks: actors by their ranks in the mesh as spawned."""
        return Called(self.extent) if self._mesh is None else self._mesh._called()

    @property
    def of_tool(self) -> bool:
        """Whether the actors belong to a tool; so do procs, which only the runtime itself calls."""
        if self._of_tool is None:
            self._of_tool = self._mesh is None or self._mesh._spec.tool
        return self._of_tool

    def plan_for(self, caster: Caster) -> CastPlan | None:
        """Plan a cast to its ranks through host agents; None if each rank gets the message directly."""
        if not self._planned:
            self._plan = caster.plan(self.procs)
            self._planned = True
        return self._plan

    @property
    def one_per_host(self) -> bool:
        """Whether each rank is alone on its host, and they are few: a tree of agents would have one level."""
        if self._one_per_host is None:
            agents = {ref.agent for ref in self.procs}
            self._one_per_host = len(agents) == len(self.procs) <= environment.CAST_FANOUT.get()
        return self._one_per_host

    def note_raised(self, failure: RankFailure) -> None:
        """Record that an error that reports this failure is being raised."""
        if failure.death is not None:
            self.reported.raised.update((failure.proc, (self.actor, failure.proc)))


def failure_of(node: Node, target: Target, rank: int, fault: Fault | None, death: Death | None) -> RankFailure:
    """Describe one failed rank for an error."""
    ref = target.procs[rank]
    pid = node.pids.get(ref.id, 0)
    if death is not None:
        pid = death.pid or pid
    point = Point(rank, target.extent)
    return RankFailure(rank, dict(point), ref.host, pid, ref.id, fault, death)


def unresponsive_text(node: Node, target: Target, ranks: list[int]) -> str:
    """Describe the awaited ranks that do not respond."""
    silent = [
        (rank, node.unresponsive[target.procs[rank].id]) for rank in ranks if target.procs[rank].id in node.unresponsive
    ]
    if not silent:
        return ""
    rank, news = silent[0]
    text = f"; {target.called.name([rank])} (host {news.host}, pid {news.pid}) does not respond: {news.why}"
    if len(silent) > 1:
        text += f" (and {len(silent) - 1} more)"
    return f"{text}\n{news.stack}" if news.stack else text
