"""Count events that peers can cause repeatedly, so that a log gets one line per period instead of one per event."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

from monarch_kernel import logs
from monarch_kernel.runtime.node.poller import Poller, Timer

log = logs.logger(__name__)

#: The number of addresses that are counted separately. Further ones are counted together.
ADDRESSES = 64
OTHERS = "other addresses"
#: The period in which bad messages are counted before the next line about them (seconds).
_PERIOD = 60.0


class Tally:
    """Counts events by address and reason.

    The first event of a kind is written at once. Further ones are counted, and their number is written at the end of
    the period.

    Args:
        poller: runs the timer of the periods.
        period: the length of a period (seconds).
        write: called with an address, a reason, and the number of further events; by any thread that calls ``add``, and
            by the polling thread.
    """

    def __init__(self, poller: Poller, period: float, write: Callable[[str, str, int], None]) -> None:
        self._poller = poller
        self._period = period
        self._write = write
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}
        self._timer: Timer | None = None

    def add(self, address: str, reason: str) -> bool:
        """Count one event. Return whether it is the first of its kind in this period."""
        with self._lock:
            kind = address, reason
            if kind not in self._counts and len(self._counts) >= ADDRESSES:
                kind = OTHERS, reason
            count = self._counts.get(kind)
            self._counts[kind] = 0 if count is None else count + 1
            if self._timer is None:
                self._timer = self._poller.call_later(self._period, self._on_period)
        if count is None:
            self._write(*kind, 0)
        return count is None

    def close(self) -> None:
        """Write the counts so far."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            counts, self._counts = self._counts, {}
        self._write_all(counts)

    def _on_period(self) -> None:
        with self._lock:
            counts = self._counts
            # Kinds with further events are counted for another period; the others are dropped.
            self._counts = {kind: 0 for kind, count in counts.items() if count}
            self._timer = self._poller.call_later(self._period, self._on_period) if self._counts else None
        self._write_all(counts)

    def _write_all(self, counts: dict[tuple[str, str], int]) -> None:
        for kind, count in counts.items():
            if count:
                self._write(*kind, count)


_bad_messages: WeakKeyDictionary[Poller, Tally] = WeakKeyDictionary()


def is_first_bad_message(poller: Poller, where: str, kind: str) -> bool:
    """Count a message that could not be handled. Return whether to log it, as the first of its kind in this period.

    Args:
        poller: the poller of the message's link.
        where: the code that handled it last.
        kind: the kind of the error.
    """
    tally = _bad_messages.get(poller)
    if tally is None:
        tally = _bad_messages[poller] = Tally(poller, _PERIOD, _write_bad_messages)
        poller.at_close.append(tally.close)
    return tally.add(where, kind)


def _write_bad_messages(where: str, kind: str, again: int) -> None:
    if again:
        log.warning("%d more messages since then could not be handled (%s, %s)", again, kind, where)
