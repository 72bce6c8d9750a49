"""A moment in the program that is the same on all ranks, agreed upon while they run.

Ranks that exchange collectives are never all at the same line. A breakpoint that took effect on each rank when its
message arrived would stop one rank a step before the others, which then wait for it in a collective, and never come to
the line. The number of collectives that the default process group has issued is the same on all ranks at the same
step, so the controller proposes such a number that no rank has reached, and decides when all have agreed
(two-phase commit, Gray 1978). A rank that reaches it before the decision waits for that, for a moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from monarch_kernel.debugger.source_locations import is_user_frame
from monarch_kernel.engines.join.collectives import issued

#: How long a rank waits for the decision at most: the controller may have died (seconds).
PATIENCE = 2.0
#: A rank that has issued no collective for so long since the proposal is not in a loop that has any (seconds).
STALE = 3.0


@dataclass(slots=True)
class _Point:
    """A proposal, and what became of it."""

    at: int | None = None
    seen: int | None = None  # how many collectives were issued when it was proposed
    when: float = field(default_factory=time.monotonic)
    go: bool = False
    decided: threading.Event = field(default_factory=threading.Event)


#: How the names of points begin that are not those of breakpoints.
OF_CELL = "cell "

_points: dict[str, _Point] = {}
_lock = threading.Lock()


def progress() -> tuple[int | None, bool]:
    """The number of collectives issued so far, and whether user code runs here now."""
    from monarch_kernel.debugger.rank.stopping.lines import running_frames  # few agents need it

    return issued(), any(is_user_frame(frame) for _, frame in running_frames())


def propose(key: str, at: int | None) -> bool:
    """Take a proposal: the point ``key`` is when ``at`` collectives were issued; None: at once.

    Returns:
        Whether this rank agrees: it has not reached that yet, and will wait there for the decision.
    """
    with _lock:
        now = issued()
        if at is not None and now is not None and now >= at:
            return False
        known = _points.get(key)
        if known is None or not known.go:  # the decision may have overtaken a proposal that was slow
            _points[key] = _Point(at, now)
        return True


def decide(key: str, go: bool) -> None:
    """Take the decision of the controller."""
    with _lock:
        point = _points.setdefault(key, _Point())
        point.go = go
        if not go:
            del _points[key]
        point.decided.set()


def agree_now(keys: Iterable[str]) -> None:
    """Consider these points reached, on a rank that was not there when they were proposed."""
    for key in keys:
        decide(key, True)


def forget(keys: set[str]) -> None:
    """Drop all points of breakpoints but these."""
    with _lock:
        for key in set(_points) - keys:
            if not key.startswith(OF_CELL):
                _points.pop(key).decided.set()


def is_reached(key: str) -> bool:
    """Whether the program is at that point, or beyond. May wait for the decision; any thread may call it."""
    point = _points.get(key)
    if point is None:
        return False
    if point.at is not None:
        now = issued()
        if now is not None and now < point.at:
            stale = now == point.seen and time.monotonic() - point.when > STALE
            if not (stale and point.go):
                return False
    if not point.decided.wait(PATIENCE):
        decide(key, False)
        return False
    if point.go:
        point.at = None  # from now on, always
    return point.go
