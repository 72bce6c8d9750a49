"""One TCP connection of the data plane, which transfers ranges of memory in plain text or encrypted.

An encrypted connection carries frames of at most 1 MiB, each encrypted and authenticated with AES-256-GCM. Its two
keys, one per direction, are sent over the control plane and used for this connection only. The nonce can therefore be a
counter, and a frame that was changed, omitted, repeated or reordered does not decrypt.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from monarch_kernel.protocol.refs import ProcRef
from monarch_kernel.runtime.node.acceptor import Acceptor
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.tally import Tally
from monarch_kernel.runtime.transfer import device
from monarch_kernel.runtime.transfer.memory import Memory, scratch, steps

# Set up a TCP connection between two processes: which side listens, which connects, and which peers are admitted.
#
# Processes listen only on demand. A connection begins with a token of 32 bytes, which the control plane distributes
# for this connection only. Connections without a valid token are closed. The side that can be reached listens. This is
# the owner of the buffer, on the interface by which its host's gateway is known, or, if the owner belongs to a
# controller without an address, the requesting process.

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


FRAME = 1 << 20
_TAG = 16
_KEY = 32
#: The size of the secret of both sides (bytes): one key per direction.
SECRET = 2 * _KEY
#: Shorter runs of scattered memory are gathered first (bytes): one system call per run would take longer than the copy.
DIRECT = 16 << 10
#: The approximate time to detect a vanished host, if the control plane has not reported it before (seconds).
_SILENCE = 10
_UNACKNOWLEDGED = 60


def tune(sock: socket.socket) -> None:
    """Send short messages at once, and limit the wait for a vanished host."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE // 2)
    # A stalled peer acknowledges but reads nothing. This limit is longer than a permitted stall.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED * 1000)


class Connection:
    """A connection in plain text.

    Attributes:
        deadline: on the clock of ``time.monotonic()``; after it, sending and receiving raise ``TimeoutError``.
        stall_timeout: without a deadline, how long it may stall (seconds; None for no limit).
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.deadline: float | None = None
        self.stall_timeout: float | None = None
        tune(sock)

    def send(self, data: memoryview | bytes, more: bool = False) -> None:
        """Send all of the data. ``more``: other data follows at once."""
        self._send(memoryview(data), more)

    def recv_into(self, view: memoryview) -> None:
        """Fill the view.

        Raises:
            ConnectionError: the connection ended.
            TimeoutError: no data arrived in time.
        """
        self._fill(view)

    def _send(self, view: memoryview, more: bool) -> None:
        flags = socket.MSG_MORE if more else 0
        while view:
            self._limit()
            view = view[self.sock.send(view, flags) :]

    def _fill(self, view: memoryview) -> None:
        while view:
            self._limit()
            got = self.sock.recv_into(view)
            if not got:
                raise ConnectionResetError("the peer closed the connection")
            view = view[got:]

    def _limit(self) -> None:
        limit = self.stall_timeout
        if self.deadline is not None:
            limit = self.deadline - time.monotonic()
            if limit <= 0:
                raise TimeoutError
        if limit != self.sock.gettimeout():
            self.sock.settimeout(limit)

    def cut(self) -> None:
        """Shut down the connection, from any thread. A thread that sends or receives gets an error at once."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has already ended
            pass

    def close(self) -> None:
        """Close the socket. Called only by the thread that uses it."""
        self.sock.close()


class EncryptedConnection(Connection):
    """An encrypted connection.

    Args:
        secret: both keys.
        opener: whether this side opened the connection; it then sends with the first key.
    """

    def __init__(self, sock: socket.socket, peer: str, secret: bytes, opener: bool) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        super().__init__(sock, peer)
        first, second = AESGCM(secret[:_KEY]), AESGCM(secret[_KEY:])
        self._seal, self._open = (first, second) if opener else (second, first)
        self._sent = self._received = 0
        self._out = memoryview(bytearray())
        self._in = memoryview(bytearray())
        self._rest = memoryview(b"")

    def send(self, data: memoryview | bytes, more: bool = False) -> None:
        view = memoryview(data)
        while view:
            piece, view = view[:FRAME], view[FRAME:]
            size = piece.nbytes + _TAG
            if len(self._out) < 4 + size:
                self._out = memoryview(bytearray(4 + size))
            self._out[:4] = size.to_bytes(4, "little")
            self._seal.encrypt_into(self._sent.to_bytes(12, "little"), piece, None, self._out[4 : 4 + size])
            self._sent += 1
            self._send(self._out[: 4 + size], more or bool(view))

    def recv_into(self, view: memoryview) -> None:
        head = bytearray(4)
        while view:
            if not self._rest:
                self._fill(memoryview(head))
                size = int.from_bytes(head, "little")
                if not _TAG < size <= FRAME + _TAG:
                    raise ConnectionAbortedError("the peer sent an invalid frame")
                if len(self._in) < size:
                    self._in = memoryview(bytearray(size))
                frame = self._in[:size]
                self._fill(frame)
                plain = size - _TAG
                if plain <= view.nbytes:
                    self._unseal(frame, view[:plain])
                    view = view[plain:]
                    continue
                self._rest = memoryview(bytearray(plain))
                self._unseal(frame, self._rest)
            some = min(len(self._rest), view.nbytes)
            view[:some] = self._rest[:some]
            view, self._rest = view[some:], self._rest[some:]

    def _unseal(self, frame: memoryview, into: memoryview) -> None:
        from cryptography.exceptions import InvalidTag

        try:
            self._open.decrypt_into(self._received.to_bytes(12, "little"), frame, None, into)
        except InvalidTag:
            raise ConnectionAbortedError("a frame was not encrypted with this connection's key") from None
        self._received += 1


@functools.cache
def can_encrypt() -> bool:
    """Return whether encrypted connections are possible here."""
    return find_spec("cryptography") is not None


def new_secret() -> bytes:
    """Create a secret for one connection. Also imports the encryption, so that the poller need not wait for it."""
    import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401  # pyright: ignore[reportUnusedImport]

    return secrets.token_bytes(SECRET)


def send_memory(connection: Connection, memory: Memory, at: int, size: int) -> None:
    """Send bytes of an object, directly from its memory if the runs are long enough."""
    for view in _pieces(memory, at, size):
        if view is None:
            for lo, hi in steps(memory.layout, at, at + size):
                between = scratch(hi - lo)
                device.gather(memory, lo, hi - lo, ctypes.addressof(between))
                connection.send(_bytes(between)[: hi - lo], hi < at + size)
        else:
            connection.send(view)


def recv_memory(connection: Connection, memory: Memory, at: int, size: int) -> None:
    """Receive bytes of an object, directly into its memory if the runs are long enough."""
    for view in _pieces(memory, at, size):
        if view is None:
            for lo, hi in steps(memory.layout, at, at + size):
                between = scratch(hi - lo)
                connection.recv_into(_bytes(between)[: hi - lo])
                device.scatter(memory, lo, hi - lo, ctypes.addressof(between))
        else:
            connection.recv_into(view)


def skip(connection: Connection, size: int) -> None:
    """Receive bytes and discard them."""
    between = memoryview(bytearray(min(size, FRAME)))
    while size:
        some = min(size, len(between))
        connection.recv_into(between[:some])
        size -= some


def _pieces(memory: Memory, at: int, size: int) -> Iterator[memoryview | None]:
    """Yield views of the memory, in order; a single None instead for GPU memory or short runs."""
    layout = memory.layout
    part = None if memory.device else layout.part(at, at + size)
    if memory.device or (layout.run < DIRECT and (part is None or not part.contiguous)):
        yield None
        return
    runs = [(part.address, size)] if part is not None and part.contiguous else layout.runs(at, at + size)
    for address, length in runs:
        yield _bytes((ctypes.c_char * length).from_address(address))


def _bytes(memory: Any) -> memoryview:
    return memoryview(memory).cast("B")
