"""Select the frames of a stop to show, and group stops, for a prompt, a `StopSet` and an IDE.

A stop is shown at its innermost frame of user code. Stops belong to one group if they are shown at the same location
and, for errors, if their messages are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from monarch_kernel.debugger.events import RankStop
from monarch_kernel.debugger.model.stops import StopFrame
from monarch_kernel.debugger.source_locations import RUNTIME, kind_of

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
