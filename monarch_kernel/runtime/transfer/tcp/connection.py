"""One TCP connection of the data plane, which transfers ranges of memory in plain text or encrypted.

An encrypted connection carries frames of at most 1 MiB, each encrypted and authenticated with AES-256-GCM. Its two
keys, one per direction, are sent over the control plane and used for this connection only. The nonce can therefore be a
counter, and a frame that was changed, omitted, repeated or reordered does not decrypt.
"""

from __future__ import annotations

import ctypes
import functools
import secrets
import socket
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from monarch_kernel.runtime.transfer import device
from monarch_kernel.runtime.transfer.memory import Memory
from monarch_kernel.runtime.transfer.memory_copy import scratch, steps

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
