"""The audit log: a line for each connection and refusal, with the identity proved by TLS, not a peer's claims.

A TCP listener reports each connection to its ``Audit``, which writes a line to the log, and to a file if one is
configured::

    2026-11-22T03:16:00.123Z connected alice@laptop 3f9a1c2233445566 10.0.0.5:41234
    2026-11-22T03:16:09.004Z ended alice@laptop 3f9a1c2233445566 10.0.0.5:41234: the connection was closed
    2026-11-22T03:17:30.550Z refused - - 10.0.0.66: its key is not one that this worker trusts

Any stranger can cause refusals. Refusals of one address for one reason therefore share one line per period, with their
number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

from monarch_kernel import logs
from monarch_kernel.protocol.private_files import AppendOnlyFile
from monarch_kernel.runtime.node.poller import Poller, Timer

# Count events that peers can cause repeatedly, so that a log gets one line per period instead of one per event.

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


#: How much of a fingerprint is written (hex digits).
FINGERPRINT = 16
#: How long refusals are counted before the next line about them (seconds).
PERIOD = 60.0


class Audit:
    """Writes the audit lines. It is thread-safe, and its methods never raise.

    Args:
        poller: runs the timer that writes counted refusals.
        path: a file to append to, created with mode 0600 (and created again when it is moved away); "": only the log
            gets the lines.

    Raises:
        OSError: the file cannot be opened for appending, or others may access it.
    """

    def __init__(self, poller: Poller, path: str = "") -> None:
        self._refusals = Tally(poller, PERIOD, self._write_refused)
        self._file = AppendOnlyFile(path) if path else None
        self._path = path

    def connected(self, name: str, fingerprint: str, address: str) -> None:
        """Record that a peer has proved a trusted key and has a link."""
        self._write(log.info, f"connected {name} {fingerprint[:FINGERPRINT]} {address}")

    def ended(self, name: str, fingerprint: str, address: str, why: str) -> None:
        """Record the end of such a link."""
        self._write(log.info, f"ended {name} {fingerprint[:FINGERPRINT]} {address}: {why}")

    def refused(self, address: str, why: str) -> None:
        """Record that a connection from this address (``host:port``) was refused."""
        self._refusals.add(address.rpartition(":")[0] or address, why)

    def close(self) -> None:
        """Write the counts so far, and close the file."""
        self._refusals.close()
        if self._file is not None:
            self._file.close()

    def _write_refused(self, host: str, why: str, again: int) -> None:
        more = f" ({again} more since)" if again else ""
        self._write(log.warning, f"refused - - {host}: {why}{more}")

    def _write(self, log_line: Callable[[str, str], None], line: str) -> None:
        line = "".join(c if c.isprintable() else "?" for c in line)
        log_line("%s", line)
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        try:
            if self._file is not None:
                self._file.append(f"{stamp} {line}")
        except OSError as e:
            log.error("cannot write to the audit file %s: %s", self._path, e.strerror or e)
