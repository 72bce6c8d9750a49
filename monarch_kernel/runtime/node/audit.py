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

import time
from collections.abc import Callable

from monarch_kernel import logs
from monarch_kernel.protocol.append_only_file import AppendOnlyFile
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.tally import Tally

log = logs.logger(__name__)

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
