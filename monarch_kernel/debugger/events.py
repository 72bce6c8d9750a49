"""The events that viewers of the debugger receive, and the stops and breakpoints in them."""

from __future__ import annotations

from dataclasses import dataclass, field

from monarch_kernel.debugger.model.stops import Bound, Breakpoint, ErrorRecord, Stop

Key = tuple[str, int, int]
"""A stop: the mesh's name, the rank, and the stop's id in that rank's process."""


@dataclass(frozen=True, slots=True)
class RankStop:
    """A stop of one rank.

    Attributes:
        mesh: the mesh's name.
        rank: the rank in the mesh as spawned.
        point: its coordinates, by dimension.
        host: the name of its host.
        pid: its process.
        stop: where and why.
    """

    mesh: str
    rank: int
    point: dict[str, int]
    host: str
    pid: int
    stop: Stop

    @property
    def key(self) -> Key:
        """Identifies this stop among all stops."""
        return self.mesh, self.rank, self.stop.id


@dataclass(frozen=True, slots=True)
class RankErrorRecord:
    """An error whose frames a rank of a mesh keeps."""

    mesh: str
    rank: int
    error: ErrorRecord


@dataclass(frozen=True, slots=True)
class RankStopped:
    """A rank has stopped."""

    at: RankStop


@dataclass(frozen=True, slots=True)
class RankResumed:
    """A stop is over.

    Attributes:
    key: identifies the stop.
    how: as in `model.stops.Resumed`; "gone" if the rank died; "passed on" if the stop lasts, and another viewer of a
    joined job has received it.
    """

    key: Key
    how: str = "continue"


@dataclass(frozen=True, slots=True)
class RankRanOff:
    """A step has ended without another stop: user code has returned. ``key`` is the stop at which the step began."""

    key: Key


@dataclass(frozen=True, slots=True)
class RankGone:
    """A rank of a watched mesh has died."""

    mesh: str
    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class BreakpointsChanged:
    """Breakpoints were set, cleared, or bound by a rank."""


Event = RankStopped | RankResumed | RankRanOff | RankGone | BreakpointsChanged


@dataclass(slots=True)
class MeshBreakpoint:
    """A breakpoint, and the ranks that it applies to.

    Attributes:
        id: its id, unique in this controller.
        mesh: the name of the mesh; None for all meshes, including later ones.
        ranks: the ranks; None for all.
        spec: where and when to stop.
        owner: the viewer that set it; "" for the user.
        bound: its state in ranks that have answered, by mesh and rank.
        lost: why no rank has it: its line is gone from the version of the file that ranks have loaded; otherwise "".
        apart: why ranks cannot stop there together, by mesh; only for meshes where others wait for stopped ranks.
    """

    id: int
    mesh: str | None
    ranks: tuple[int, ...] | None
    spec: Breakpoint
    owner: str = ""
    bound: dict[tuple[str, int], Bound] = field(default_factory=dict[tuple[str, int], Bound])
    lost: str = ""
    apart: dict[str, str] = field(default_factory=dict[str, str])

    def holds_on(self, mesh: str, rank: int) -> bool:
        """Whether it applies to that rank."""
        return not self.lost and self.mesh in (None, mesh) and (self.ranks is None or rank in self.ranks)
