"""What a call addresses: the ranks of a mesh, and what errors say of those that fail."""

from __future__ import annotations

from typing import Any

from monarch_kernel.protocol.faults import Fault
from monarch_kernel.protocol.messages import Death, ProcRef
from monarch_kernel.runtime.actor.errors import RankFailure
from monarch_kernel.runtime.mesh.shape import Extent, Point
from monarch_kernel.runtime.node.node import Node


class ReportedDeaths:
    """Which deaths calls of this process have met, by the keys of ``supervision.tree.Notice``.

    Attributes:
        met: a pending call failed because of it; whoever waits for that call will be told.
        raised: somebody has asked for such a call's result, and been told.
    """

    __slots__ = ("met", "raised")

    def __init__(self) -> None:
        self.met: set[Any] = set()
        self.raised: set[Any] = set()


_UNPLANNED = object()


class Target:
    """Whom a call addresses: names for errors, and the proc of each rank. Shared by all calls of a mesh handle."""

    __slots__ = ("_mesh", "_plan", "actor", "by_proc", "extent", "mesh_name", "procs", "reported")

    def __init__(
        self,
        mesh_name: str,
        actor: str,
        extent: Extent,
        procs: tuple[ProcRef, ...],
        reported: ReportedDeaths,
        mesh: Any = None,
    ) -> None:
        self.mesh_name = mesh_name
        self.actor = actor
        self.extent = extent
        self.procs = procs
        self.reported = reported
        self.by_proc: dict[str, list[int]] = {}
        for rank, ref in enumerate(procs):
            self.by_proc.setdefault(ref.id, []).append(rank)
        self._plan: Any = _UNPLANNED
        self._mesh = mesh  # the actor mesh, if it is one

    @property
    def actor_class(self) -> str:
        """The class of the actors, as errors name it; "" for procs."""
        return "" if self._mesh is None else self._mesh._class_label()

    def plan_for(self, system: Any) -> Any:
        """Which ranks a cast reaches through host agents (``casting.Plan``); None: each is sent to by itself."""
        if self._plan is _UNPLANNED:
            self._plan = system.caster.plan(self.procs)
        return self._plan

    def note_raised(self, failure: RankFailure) -> None:
        """Somebody is told of this failure now."""
        if failure.death is not None:
            self.reported.raised.update((failure.proc, (self.actor, failure.proc)))


def failure_of(node: Node, target: Target, rank: int, fault: Fault | None, death: Death | None) -> RankFailure:
    """What an error says of one failed rank."""
    ref = target.procs[rank]
    pid = node.pids.get(ref.id, 0)
    if death is not None:
        pid = death.pid or pid
    point = Point(rank, target.extent)
    return RankFailure(rank, dict(point), ref.host, pid, ref.id, fault, death)


def unresponsive_text(node: Node, target: Target, ranks: list[int]) -> str:
    """What is known of ranks that are waited for and do not respond."""
    silent = [
        (rank, node.unresponsive[target.procs[rank].id]) for rank in ranks if target.procs[rank].id in node.unresponsive
    ]
    if not silent:
        return ""
    rank, news = silent[0]
    text = f"; rank {rank} (host {news.host}, pid {news.pid}) does not respond: {news.why}"
    if len(silent) > 1:
        text += f" (and {len(silent) - 1} more)"
    return f"{text}\n{news.stack}" if news.stack else text
