"""The audit log: a line for each connection and refusal, with what TLS has proved, not what a peer claims.

A TCP listener reports each connection to its ``Audit``, which writes a line to the log, and to a file if one is
configured::

    2026-11-22T03:16:00.123Z connected alice@laptop 3f9a1c2233445566 10.0.0.5:41234
    2026-11-22T03:16:09.004Z ended alice@laptop 3f9a1c2233445566 10.0.0.5:41234: the connection was closed
    2026-11-22T03:17:30.550Z refused - - 10.0.0.66: its key is not one that this worker trusts

Any stranger can cause refusals, so those of one address for one reason share one line per period, with their number.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time

from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.tally import Tally

log = logging.getLogger(__name__)

#: How much of a fingerprint is written (hex digits).
FINGERPRINT = 16
#: How long refusals are counted before the next line about them (seconds).
PERIOD = 60.0


class Audit:
    """Writes the audit lines. Any thread may call it; its methods do not raise.

    Args:
        poller: runs the timer that writes counted refusals.
        path: a file to append to, created with mode 0600 (and created again when it is moved away); "": only the log
            gets the lines.

    Raises:
        OSError: the file cannot be opened for appending.
    """

    def __init__(self, poller: Poller, path: str = "") -> None:
        self._refusals = Tally(poller, PERIOD, self._write_refused)
        self._path = path
        self._lock = threading.Lock()
        self._fd = _open(path) if path else -1

    def connected(self, name: str, fingerprint: str, address: str) -> None:
        """Record that a peer has proved a trusted key and has a link."""
        self._write(logging.INFO, f"connected {name} {fingerprint[:FINGERPRINT]} {address}")

    def ended(self, name: str, fingerprint: str, address: str, why: str) -> None:
        """Record the end of such a link."""
        self._write(logging.INFO, f"ended {name} {fingerprint[:FINGERPRINT]} {address}: {why}")

    def refused(self, address: str, why: str) -> None:
        """Record that a connection from this address (``host:port``) was refused."""
        self._refusals.add(address.rpartition(":")[0] or address, why)

    def close(self) -> None:
        """Write the counts so far, and close the file."""
        self._refusals.close()
        with self._lock:
            fd, self._fd, self._path = self._fd, -1, ""
        if fd >= 0:
            os.close(fd)

    def _write_refused(self, host: str, why: str, again: int) -> None:
        more = f" ({again} more since)" if again else ""
        self._write(logging.WARNING, f"refused - - {host}: {why}{more}")

    def _write(self, level: int, line: str) -> None:
        line = "".join(c if c.isprintable() else "?" for c in line)
        log.log(level, "%s", line)
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        try:
            with self._lock:
                if self._path:
                    self._follow()
                    os.write(self._fd, f"{stamp} {line}\n".encode())  # one write, so that lines do not mix
        except OSError as e:
            log.error("cannot write to the audit file %s: %s", self._path, e.strerror)

    def _follow(self) -> None:
        """Continue in a new file if this one was moved away, as by log rotation."""
        try:
            same = os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except FileNotFoundError:
            same = False
        if not same:
            fd = _open(self._path)
            os.close(self._fd)
            self._fd = fd


def _open(path: str) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return fd
