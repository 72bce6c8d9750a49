"""Estimate the offset of another process's clock from round trips, like NTP. Pure.

A sample is a round trip: the time of the request, the remote time of the answer, and the time of its arrival. The
remote clock is ahead by the remote time minus the middle of the trip, with an error of at most half the trip. The
shortest trip has the smallest error. Two estimates at different times show the drift of the remote clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ClockSample(NamedTuple):
    """One round trip (nanoseconds): ``sent`` and ``received`` on the local clock, ``remote`` on the other."""

    sent: int
    remote: int
    received: int


class ClockOffset(NamedTuple):
    """The offset of another clock (nanoseconds).

    Attributes:
        at: the time of the estimate, on the local clock.
        ahead: how far the other clock is ahead.
        error: the maximum error.
    """

    at: int
    ahead: int
    error: int


def estimate(samples: Iterable[ClockSample]) -> ClockOffset | None:
    """Return the best estimate from several round trips; None without samples.

    If all samples are consistent with equal clocks, the offset is 0: the processes of a host share a clock.
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
    """Converts times of another process to the local clock.

    Args:
        first: an estimate; None: the clocks are equal.
        last: a later estimate; the offset is interpolated linearly between the two.
    """

    __slots__ = ("_first", "_rate", "error")

    def __init__(self, first: ClockOffset | None = None, last: ClockOffset | None = None) -> None:
        first = first or last or ClockOffset(0, 0, 0)
        last = last or first
        if abs(last.ahead - first.ahead) <= first.error + last.error:  # no drift beyond the errors
            first = last = min(first, last, key=lambda offset: offset.error)
        self._first = first
        passed = last.at - first.at
        self._rate = (last.ahead - first.ahead) / passed if passed > 0 else 0.0
        #: The maximum error of converted times (nanoseconds).
        self.error = max(first.error, last.error)

    def ours(self, remote: int) -> int:
        """Convert a time of the other clock to the local clock."""
        passed = remote - self._first.ahead - self._first.at
        return (
            remote - self._first.ahead - round(self._rate * passed / (1 + self._rate))
            if self._rate
            else (remote - self._first.ahead)
        )
