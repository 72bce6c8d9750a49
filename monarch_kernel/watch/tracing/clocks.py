"""The clock of another process in terms of ours, from round trips: what NTP does. Pure.

A sample is a round trip: when we asked, the other's time when it answered, and when the answer came. The other's clock
is then ahead of ours by its time minus the middle of the trip, with an error of at most half the trip. The shortest
trip has the least error. Two estimates some time apart show how much faster the other clock runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ClockSample(NamedTuple):
    """One round trip (nanoseconds): ``sent`` and ``received`` on our clock, ``remote`` on the other."""

    sent: int
    remote: int
    received: int


class ClockOffset(NamedTuple):
    """How far another clock is ahead of ours (nanoseconds).

    Attributes:
        at: when that was, on our clock.
        ahead: how far.
        error: by how much that may be wrong.
    """

    at: int
    ahead: int
    error: int


def estimate(samples: Iterable[ClockSample]) -> ClockOffset | None:
    """The best estimate from several round trips; None without any.

    Where no sample tells the clocks apart, they count as equal: the processes of a host share one.
    """
    best: ClockOffset | None = None
    equal = True
    for sent, remote, received in samples:
        received = max(sent, received)
        middle = (sent + received) // 2
        found = ClockOffset(middle, remote - middle, (received - sent + 1) // 2)
        equal = equal and sent <= remote <= received
        if best is None or found.error < best.error:
            best = found
    if best is not None and equal:
        return best._replace(ahead=0)
    return best


class ClockAlignment:
    """Converts the times of another process to ours.

    Args:
        first: an estimate; None: the clocks are equal.
        last: a later one; between the two the offset changes evenly.
    """

    __slots__ = ("_first", "_rate", "error")

    def __init__(self, first: ClockOffset | None = None, last: ClockOffset | None = None) -> None:
        first = first or last or ClockOffset(0, 0, 0)
        last = last or first
        if abs(last.ahead - first.ahead) <= first.error + last.error:  # no drift that the errors do not explain
            first = last = min(first, last, key=lambda offset: offset.error)
        self._first = first
        passed = last.at - first.at
        self._rate = (last.ahead - first.ahead) / passed if passed > 0 else 0.0
        #: By how much converted times may be wrong (nanoseconds).
        self.error = max(first.error, last.error)

    def ours(self, remote: int) -> int:
        """A time of the other clock on ours."""
        passed = remote - self._first.ahead - self._first.at
        return (
            remote - self._first.ahead - round(self._rate * passed / (1 + self._rate))
            if self._rate
            else (remote - self._first.ahead)
        )
