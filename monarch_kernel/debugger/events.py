"""The events that viewers of the debugger receive, and the stops and breakpoints in them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import cast

from monarch_kernel.debugger.model.evidence import Evidence
from monarch_kernel.debugger.model.stops import Bound, Breakpoint, ErrorRecord, StackSnapshot, Stop, StopFrame
from monarch_kernel.debugger.source_locations import RUNTIME, SourceLocation, kind_of
from monarch_kernel.workers import client_path

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


# Select the frames of a stop to show, and group stops, for a prompt, a `StopSet` and an IDE.
#
# A stop is shown at its innermost frame of user code. Stops belong to one group if they are shown at the same location
# and, for errors, if their messages are equal.

# Translate source paths of ranks to the controller's paths, so that a front end opens its own files.
#
# A sync copies the controller's folders to other paths on hosts. ``monarch_kernel.workers.client_path`` maps these
# paths back.


def stop_at_client(stop: Stop) -> Stop:
    """Return a copy of a stop whose frames use the controller's file names."""
    frames = tuple(
        replace(frame, file=path, loaded=frame.file)
        if (path := client_path(frame.file)) is not None and path != frame.file
        else frame
        for frame in stop.frames
    )
    return stop if frames == stop.frames else replace(stop, frames=frames)


def snapshot_at_client(snapshot: StackSnapshot) -> StackSnapshot:
    """Return a copy of a rank's stacks that uses the controller's file names."""
    files = {frame.place.file for stack in snapshot.stacks for frame in stack.frames}
    names = {file: path for file in files if (path := client_path(file)) is not None}
    if not names:
        return snapshot
    stacks = tuple(
        stack._replace(
            frames=tuple(
                frame._replace(place=frame.place._replace(file=names.get(frame.place.file, frame.place.file)))
                for frame in stack.frames
            )
        )
        for stack in snapshot.stacks
    )
    return snapshot._replace(stacks=stacks)


def evidence_at_client(evidence: Evidence) -> Evidence:
    """Return a copy of a rank's evidence with the controller's file names, so that all hosts are comparable."""
    places = [place for place in (evidence.place, *evidence.stack) if place is not None]
    if all(client_path(place.file) is None for place in places):
        return evidence
    return cast("Evidence", _renamed(evidence, {}))


def _renamed(value: object, names: dict[str, str]) -> object:
    if isinstance(value, SourceLocation):
        if value.file not in names:
            names[value.file] = client_path(value.file) or value.file
        return value._replace(file=names[value.file])
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: _renamed(getattr(value, field.name), names) for field in fields(value)}
        return replace(value, **changed)
    if type(value) is tuple:
        return tuple(_renamed(each, names) for each in cast("tuple[object, ...]", value))
    if isinstance(value, Mapping):
        return {key: _renamed(each, names) for key, each in cast("Mapping[object, object]", value).items()}
    return value


FrameKey = tuple[str, int, str]
"""File, line and function of a frame: what frames of different ranks at the same place have in common."""


def user_frames(frames: Sequence[StopFrame]) -> list[StopFrame]:
    """Return the frames of user code, innermost first, which `up` and `down` traverse; all frames if there are none."""
    return [frame for frame in frames if frame.user] or list(frames)


def shown_frame(frames: Sequence[StopFrame], up: int = 0) -> StopFrame | None:
    """Return the frame at which a stop is shown; None if it has no frames.

    Args:
        frames: the frames of the stop, innermost first.
        up: how many frames of user code further out; limited to the outermost one.
    """
    found = user_frames(frames)
    return found[min(up, len(found) - 1)] if found else None


def frames_of_a_stack(frames: Sequence[StopFrame]) -> list[StopFrame]:
    """Return the frames that a text stack shows: the innermost, and user code; all frames if there is no user code."""
    found = [frame for frame in frames if frame.user or frame.index == 0]
    return found if any(frame.user for frame in found) else list(frames)


def frames_of_an_ide(frames: Sequence[StopFrame]) -> list[StopFrame]:
    """Return the frames that an IDE shows; all frames if there is no user code.

    These include the libraries in between, which the IDE dims, but neither frames of this package nor those outside the
    outermost user code.
    """
    outermost = max((at for at, frame in enumerate(frames) if frame.user), default=-1)
    found = [frame for frame in frames[: outermost + 1] if kind_of(frame.file) != RUNTIME]
    return found or list(frames)


def frame_key(frame: StopFrame | None) -> FrameKey:
    """Return a key that is equal for frames of different ranks at the same location."""
    return (frame.file, frame.line, frame.name) if frame is not None else ("", 0, "")


def group_key(at: RankStop) -> Hashable:
    """Return a key that is equal for stops that can continue together.

    The text of a step, such as a function's return value, may differ between ranks. The text of an error may not.
    """
    error = "" if at.stop.steppable else at.stop.text
    return at.mesh, frame_key(shown_frame(at.stop.frames)), error


def grouped(stops: Iterable[RankStop], key: Callable[[RankStop], Hashable] = group_key) -> list[list[RankStop]]:
    """Group stops by key: the largest group first; among equal sizes, the one with the lowest rank."""
    groups: dict[Hashable, list[RankStop]] = {}
    for at in sorted(stops, key=lambda at: at.key):
        groups.setdefault(key(at), []).append(at)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0].key))
