"""Set up a TCP connection between two processes: which side listens, which connects, and which peers are admitted.

Processes listen only on demand. A connection begins with a token of 32 bytes, which the control plane distributes for
this connection only. Connections without a valid token are closed. The side that can be reached listens. This is the
owner of the buffer, on the interface by which its host's gateway is known, or, if the owner belongs to a controller
without an address, the requesting process.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from monarch_kernel.protocol.refs import ProcRef
from monarch_kernel.runtime.node.acceptor import Acceptor
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.tally import Tally

log = logging.getLogger(__name__)

TOKEN = 32
#: The validity of a token, and the time limit for a connection attempt and for a new connection to send its token
#: (seconds).
EXPIRY = 60.0
CONNECT = 5.0
GREETING = 5.0
#: The maximum number of connections that have not sent a token yet. Beyond that, the oldest is closed.
UNIDENTIFIED = 64
#: How long refusals are counted before the log reports them again (seconds).
REFUSALS = 60.0
LOOPBACK = "127.0.0.1"


def host_of(ref: ProcRef, seen_from: ProcRef) -> str:
    """Return where processes of a site can listen so that another process reaches them; "" if nowhere."""
    if ref.site == seen_from.site:
        return LOOPBACK
    scheme, _, place = ref.gateway_address.partition("://")
    return place.rpartition(":")[0].strip("[]") if scheme == "tcp" else ""


@dataclass(slots=True)
class _Expected:
    until: float
    welcome: Callable[[socket.socket], None]


def dial(address: tuple[str, int], token: bytes, deadline: float | None) -> socket.socket:
    """Connect, and send the token.

    Raises:
        OSError: nothing listens there in time.
    """
    limit = CONNECT if deadline is None else min(CONNECT, max(deadline - time.monotonic(), 0.001))
    sock = socket.create_connection(address, limit)
    _ours.add(sock)
    try:
        sock.sendall(token)
    except BaseException:
        sock.close()
        raise
    return sock


class DataPort:
    """A listening socket for expected connections, served by the polling thread."""

    def __init__(self, poller: Poller, host: str) -> None:
        self._poller = poller
        sock = _listen(host)
        self.address: tuple[str, int] = (host, sock.getsockname()[1])
        self._expected: dict[bytes, _Expected] = {}
        self._unidentified: dict[int, _Unidentified] = {}
        self._guard = threading.Lock()
        self._refusals = Tally(poller, REFUSALS, self._log_refused)
        _ours.add(sock)
        self._acceptor = Acceptor(poller, sock, "the data port", self._on_connection, self._make_room)
        poller.start_background()

    def expect(self, welcome: Callable[[socket.socket], None]) -> bytes:
        """Create a token. If a connection sends it in time, the poller calls ``welcome(socket)`` once."""
        now = time.monotonic()
        token = secrets.token_bytes(TOKEN)
        with self._guard:
            for old in [old for old, expected in self._expected.items() if expected.until < now]:
                del self._expected[old]
            self._expected[token] = _Expected(now + EXPIRY, welcome)
        return token

    def forget(self, token: bytes) -> None:
        """Stop admitting connections with this token."""
        with self._guard:
            self._expected.pop(token, None)

    def _on_connection(self, sock: socket.socket, where: tuple[str, int]) -> None:
        if len(self._unidentified) >= UNIDENTIFIED:
            self._make_room()
        _ours.add(sock)
        self._unidentified[sock.fileno()] = _Unidentified(self, sock, where[0])

    def _make_room(self) -> bool:
        """Close the connection that has waited longest without a token. Return whether there was one."""
        oldest = next(iter(self._unidentified.values()), None)
        if oldest is not None:
            oldest.leave("too many others are waiting")
        return oldest is not None

    def admit(self, token: bytes, sock: socket.socket) -> bool:
        """Admit a connection with this token. Return False if the token is unknown or has expired."""
        with self._guard:
            expected = self._expected.pop(token, None)
        if expected is None or expected.until < time.monotonic():
            return False
        expected.welcome(sock)
        return True

    def close(self) -> None:
        """Stop listening, and discard all tokens."""
        self._acceptor.close()
        for unidentified in list(self._unidentified.values()):
            unidentified.leave("")
        with self._guard:
            self._expected.clear()
        self._refusals.close()

    def _log_refused(self, where: str, why: str, again: int) -> None:
        more = f" ({again} more since)" if again else ""
        log.warning("refused a data connection from %s: %s%s", where, why, more)


class _Unidentified:
    """A connection that has not sent its token yet."""

    def __init__(self, data_port: DataPort, sock: socket.socket, where: str) -> None:
        self._data_port = data_port
        self._sock = sock
        self._where = where
        self._fd = sock.fileno()
        self._shown = b""
        sock.setblocking(False)
        poller = data_port._poller
        self._timer = poller.call_later(GREETING, lambda: self.leave("it showed no token"))
        poller.register(self._fd, self._on_data)

    def _on_data(self, _events: int) -> None:
        try:
            data = self._sock.recv(TOKEN - len(self._shown))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._shown += data
        if not data:
            self.leave("it showed no token")
        elif len(self._shown) == TOKEN:
            self._forget()
            if not self._data_port.admit(self._shown, self._sock):
                self._refuse("its token is unknown")

    def leave(self, why: str) -> None:
        """Close the connection and log the reason."""
        if self._fd in self._data_port._unidentified:
            self._forget()
            self._refuse(why)

    def _forget(self) -> None:
        del self._data_port._unidentified[self._fd]
        self._timer.cancel()
        self._data_port._poller.unregister(self._fd)

    def _refuse(self, why: str) -> None:
        if why:
            self._data_port._refusals.add(self._where, why)
        self._sock.close()


def _listen(host: str) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    everywhere = ("::" if family == socket.AF_INET6 else "0.0.0.0", 0)
    if str(address[0]).startswith(("127.", "::1")) and host not in (address[0], "localhost"):
        address = everywhere  # the name resolves to the loopback interface only on the host itself
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        try:
            sock.bind(address)
        except OSError:  # other hosts know this host by an address that none of its interfaces has
            sock.bind(everywhere)
        sock.listen(256)
    except BaseException:
        sock.close()
        raise
    return sock


_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forked() -> None:
    """Close the connections in a forked child: they belong to the parent, and must end when it closes them."""
    for sock in list(_ours):
        sock.close()


os.register_at_fork(after_in_child=_forked)
