"""Sets of stopped ranks, which are inspected and stepped together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_kernel.debugger.controller.viewers import Viewer
from monarch_kernel.debugger.events import (
    Event,
    FrameKey,
    Key,
    RankGone,
    RankRanOff,
    RankStop,
    RankStopped,
    frame_key,
    grouped,
    shown_frame,
    user_frames,
)
from monarch_kernel.debugger.model.stops import Evaluation, StopFrame
from monarch_kernel.meshes import format_ranks

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hub import MeshDebugger

#: How long a step may take before the set is shown without the ranks that still run (seconds). Such ranks may wait for
#: ranks outside the set.
PATIENCE = 2.0


@dataclass(frozen=True, slots=True)
class StopGroup:
    """Ranks that are stopped at the same location, for the same reason.

    Attributes:
        place: file, line and function of their innermost frame of user code.
        stops: their stops, by mesh and rank.
    """

    place: FrameKey
    stops: tuple[RankStop, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, sorted."""
        return tuple(sorted({at.rank for at in self.stops}))

    @property
    def frame(self) -> StopFrame:
        """Their innermost frame of user code."""
        return shown_frame(self.stops[0].stop.frames) or StopFrame(0, "", "", 0, False, "")

    def __str__(self) -> str:
        file, line, name = self.place
        return f"{format_ranks(self.ranks)}: {file}:{line} in {name}"


@dataclass(frozen=True, slots=True)
class Moved:
    """The outcome of a step.

    Attributes:
        groups: which ranks are stopped where now, the largest group first.
        running: mesh and rank of those that still run: their step has not ended, or user code has returned.
        ended: mesh and rank of those that died.
        diverged: whether the step has separated ranks that were together before.
    """

    groups: tuple[StopGroup, ...]
    running: tuple[tuple[str, int], ...]
    ended: tuple[tuple[str, int], ...]
    diverged: bool

    def __repr__(self) -> str:
        lines = [str(group) for group in self.groups]
        for what, ranks in (("run on", self.running), ("ended", self.ended)):
            if ranks:
                lines.append(f"{format_ranks(rank for _, rank in ranks)}: {what}")
        return "\n".join(lines)


class StopSet:
    """A set of stopped ranks. `MeshDebugger.select` creates it.

    After a step, it contains the new stops of the same ranks. Frames are counted from the innermost frame of user code,
    which is shown first.
    """

    def __init__(
        self, debugger: MeshDebugger, stops: Iterable[RankStop], viewer: Viewer | None = None, depth: int = 0
    ) -> None:
        self._debugger = debugger
        self._viewer = viewer
        self.stops = tuple(stops)
        self.depth = depth  # the number of frames of user code between the innermost one and the shown one

    def __len__(self) -> int:
        return len(self.stops)

    def __bool__(self) -> bool:
        return bool(self.stops)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, sorted."""
        return tuple(sorted({at.rank for at in self.stops}))

    @property
    def groups(self) -> tuple[StopGroup, ...]:
        """Which ranks are stopped where, the largest group first."""
        return tuple(
            StopGroup(frame_key(shown_frame(each[0].stop.frames)), tuple(each)) for each in grouped(self.stops)
        )

    def where(self) -> tuple[StopGroup, ...]:
        """Which ranks are stopped where, the largest group first."""
        return self.groups

    def split(self) -> list[StopSet]:
        """One set for each group."""
        return [StopSet(self._debugger, group.stops, self._viewer) for group in self.groups]

    # -- frames ------------------------------------------------------------------------------------

    def up(self, count: int = 1) -> int:
        """Move to the caller of the shown frame. Return how far up the new frame is."""
        return self._move(self.depth + count)

    def down(self, count: int = 1) -> int:
        """Move to the frame that the shown frame called. Return how far up the new frame is."""
        return self._move(self.depth - count)

    def _move(self, depth: int) -> int:
        highest = min((len(user_frames(at.stop.frames)) for at in self.stops), default=1) - 1
        self.depth = max(0, min(depth, highest))
        return self.depth

    def _by_frame(self) -> dict[int, list[RankStop]]:
        """Group the stops by the index of the shown frame."""
        found: dict[int, list[RankStop]] = {}
        for at in self.stops:
            frame = shown_frame(at.stop.frames, self.depth)
            found.setdefault(frame.index if frame is not None else 0, []).append(at)
        return found

    # -- values ------------------------------------------------------------------------------------

    def print(self, expression: str, timeout: float = 5.0) -> dict[Key, Evaluation]:
        """Evaluate an expression in the shown frame, on every rank of the set. Return the answers by stop."""
        found: dict[Key, Evaluation] = {}
        for frame, stops in self._by_frame().items():
            found.update(self._debugger.evaluate(stops, expression, frame, timeout))
        return dict(sorted(found.items()))

    def call(self, function: Callable[[Any], Any], timeout: float = 5.0) -> dict[Key, Any]:
        """Call ``function(frame)`` with the shown frame, on every rank of the set. Return the results by stop."""
        found: dict[Key, object] = {}
        for frame, stops in self._by_frame().items():
            found.update(self._debugger.call(stops, function, frame, timeout))
        return dict(sorted(found.items()))

    # -- stepping ------------------------------------------------------------------------------------

    def next(self, patience: float = PATIENCE) -> Moved:
        """Run all ranks to their next line, over calls."""
        return self._go("next", patience)

    def step(self, patience: float = PATIENCE) -> Moved:
        """Run all ranks to the next line, into calls."""
        return self._go("step", patience)

    def out(self, patience: float = PATIENCE) -> Moved:
        """Run all ranks until their current function has returned."""
        return self._go("out", patience)

    def until(self, line: int = 0, patience: float = PATIENCE) -> Moved:
        """Run all ranks past this line of the same function, or to ``line``."""
        return self._go("until", patience, line)

    def cont(self) -> None:
        """Let all ranks continue."""
        self._debugger.resume(self.stops, "continue", viewer=self._viewer)
        self.stops = ()
        self.depth = 0

    def _go(self, how: str, patience: float, line: int = 0) -> Moved:
        before = {(at.mesh, at.rank) for at in self.stops if at.stop.steppable}
        together = len(self.groups) == 1
        again: dict[tuple[str, int], RankStop] = {}
        over: set[tuple[str, int]] = set()
        gone: set[tuple[str, int]] = set()
        changed = threading.Condition()
        old = {at.key for at in self.stops}

        def hear(event: Event) -> None:
            with changed:
                if isinstance(event, RankStopped) and event.at.key not in old:
                    again[event.at.mesh, event.at.rank] = event.at
                elif isinstance(event, RankGone):
                    gone.add((event.mesh, event.rank))
                elif isinstance(event, RankRanOff) and event.key in old:
                    over.add(event.key[:2])
                changed.notify_all()

        end = self._debugger.subscribe(hear)
        try:
            self._debugger.resume(self.stops, how, line, viewer=self._viewer)
            deadline = time.monotonic() + patience
            with changed:
                while before - set(again) - over - gone:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        break
                    changed.wait(left)
                self.stops = tuple(at for key, at in sorted(again.items()) if key in before)
        finally:
            end()
        self.depth = 0
        groups = self.groups
        here = {(at.mesh, at.rank) for at in self.stops}
        running = tuple(sorted(before - here - gone))
        diverged = len(groups) > 1 or bool(here and running)
        return Moved(groups, running, tuple(sorted(before & gone)), together and diverged)

    def __repr__(self) -> str:
        if not self.stops:
            return "<StopSet: nothing is stopped>"
        return "\n".join(map(str, self.groups))
