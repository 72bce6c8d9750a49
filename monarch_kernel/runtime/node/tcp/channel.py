"""A TCP socket with TLS, through which a ``Link`` sends and receives.

Only one thread at a time may use an OpenSSL object, but Python releases the GIL inside OpenSSL calls. So each channel
has a lock, held for a few records at a time.
"""

from __future__ import annotations

import enum
import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

#: The maximum payload of one TLS record (bytes).
RECORD = 16 * 1024
#: How much is sent before another thread may use the channel (bytes).
_TURN = 256 * 1024

#: Sockets that a forked child must close, because the connections would otherwise outlive the process that made them.
_held: set[socket.socket] = set()


def hold(sock: socket.socket) -> None:
    """Register a socket that forked children of this process close."""
    _held.add(sock)


def let_go(sock: socket.socket) -> None:
    """Unregister and close a socket."""
    _held.discard(sock)
    sock.close()


def _after_fork() -> None:
    for sock in list(_held):
        sock.close()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


class TlsChannel:
    """An encrypted, non-blocking connection.

    ``send``, ``sendmsg``, ``recv`` and ``recv_into`` work like those of a socket. They raise ``BlockingIOError`` when
    they would block, and other kinds of ``OSError`` (including ``ssl.SSLError``) when the connection has failed.
    ``recv`` returns nothing only after the other side's goodbye; a truncated connection is an error.

    Args:
        sock: a connected socket, which the channel takes over.
        context: see ``Keys``.
        server: whether this is the listening side.
    """

    __slots__ = ("_held", "_lock", "_sock")

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server: bool) -> None:
        _held.discard(sock)
        try:
            self._sock = context.wrap_socket(
                sock, server_side=server, do_handshake_on_connect=False, suppress_ragged_eofs=False
            )
        except BaseException:
            sock.close()
            raise
        hold(self._sock)
        self._lock = threading.Lock()
        self._held: bytes | None = None  # the content of a record that is encrypted but not sent yet

    def handshake(self) -> bool:
        """Continue the handshake. Return whether it is done.

        Raises:
            OSError: the handshake has failed.
        """
        with self._lock:
            try:
                self._sock.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            return True

    def certificate(self) -> bytes:
        """Return the certificate (DER) that the other side has proved to own. Valid after the handshake."""
        return self._sock.getpeercert(binary_form=True) or b""

    # -- as a socket --------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._sock.fileno()

    def setblocking(self, _flag: bool) -> None:
        """Do nothing: the channel never blocks."""

    def send(self, data: Any) -> int:
        """Send the first bytes of the data. Return how many."""
        return self.sendmsg([memoryview(data)])

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        """Send the first bytes of the views. Return how many. The next call must start with the unsent bytes."""
        total = 0
        with self._lock:
            if self._held is not None:
                return self._send_record(self._held)
            for record in _records(views):
                try:
                    total += self._send_record(record)
                except BlockingIOError:
                    if total:
                        break
                    raise
                if total >= _TURN:
                    break
        return total

    def _send_record(self, data: Any) -> int:
        try:
            sent = self._sock.send(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            # OpenSSL has encrypted it already and must send it next, unchanged.
            self._held = bytes(data)
            raise BlockingIOError from None
        self._held = None
        return sent

    def recv(self, size: int) -> bytes:
        """Receive at most one record; b"" after a goodbye."""
        with self._lock:
            try:
                return self._sock.recv(min(size, RECORD))
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def recv_into(self, view: memoryview) -> int:
        """Receive like ``recv``, into a view. Return the number of bytes."""
        with self._lock:
            try:
                return self._sock.recv_into(view)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def pending(self) -> int:
        """Return the number of decrypted bytes that are not received yet. epoll does not report these."""
        with self._lock:
            return self._sock.pending()

    # -- below TLS ------------------------------------------------------------------------------------

    def peek(self) -> bytes:
        """Peek at the first unread bytes on the wire. Must not be called during sends.

        Raises:
            OSError: there is no data (``BlockingIOError``), or the connection has failed.
        """
        return socket.socket.recv(self._sock, 3, socket.MSG_PEEK)

    def discard(self) -> bool:
        """Discard received data. Return whether more may arrive.

        Raises:
            OSError: there is no data (``BlockingIOError``), or the connection has failed.
        """
        return bool(socket.socket.recv(self._sock, 65536))

    def info(self) -> bytes:
        """Read the kernel's state of the connection (``struct tcp_info``)."""
        return self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)

    # -- ending ---------------------------------------------------------------------------------------

    def say_goodbye(self) -> bool:
        """Send TLS's goodbye, which proves that no data was truncated. Return False if the call must be repeated.

        Raises:
            OSError: the connection has failed.
        """
        with self._lock:
            try:
                self._sock.unwrap()
            except ssl.SSLWantWriteError:
                return False
            except (ssl.SSLWantReadError, ValueError, ssl.SSLError):
                pass  # it is sent, and the answer does not matter; or there was no handshake
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
            return True

    def close(self) -> None:
        """Close the connection at once. Sent data may be lost if there is unread received data."""
        with self._lock:  # otherwise another thread might use the descriptor after its reuse
            let_go(self._sock)


def _records(views: Sequence[memoryview]) -> Iterator[object]:
    """Yield the bytes of all views in pieces of one record. Only pieces that span views are copied."""
    held: list[memoryview] = []
    room = RECORD
    for view in views:
        at = 0
        while at < len(view):
            part = view[at : at + room]
            at += len(part)
            room -= len(part)
            held.append(part)
            if not room:
                yield held[0] if len(held) == 1 else b"".join(held)
                held, room = [], RECORD
    if held:
        yield held[0] if len(held) == 1 else b"".join(held)


# -- failures -----------------------------------------------------------------------------------------

#: The first bytes of TLS: the type of a handshake or alert record, and the major version.
_TLS = (b"\x16\x03", b"\x15\x03")
#: The first byte of ZeroMQ, which links used until wire version 4.
_ZMTP = b"\xff"

#: OpenSSL's reasons for an untrusted certificate of the other side, and for a missing one.
_THEIR_KEY = ("CERTIFICATE_VERIFY_FAILED",)
_NO_KEY = ("PEER_DID_NOT_RETURN_A_CERTIFICATE",)
#: Alerts of a peer that does not trust this side's certificate.
_OUR_KEY = ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "CERTIFICATE_REQUIRED", "UNSUPPORTED_CERTIFICATE")
_VERSION = ("UNSUPPORTED_PROTOCOL", "PROTOCOL_VERSION", "VERSION_TOO_LOW", "WRONG_VERSION_NUMBER", "WRONG_SSL_VERSION")


def speaks(first: bytes) -> str:
    """Recognise the protocol of a connection's first bytes: "TLS", "ZeroMQ", or "" for anything else."""
    if any(first[: len(tls)] == tls[: len(first)] for tls in _TLS):
        return "TLS"
    return "ZeroMQ" if first.startswith(_ZMTP) else ""


def is_cut(error: OSError) -> bool:
    """Return whether an error means that the connection was cut, and not that its data was invalid."""
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
        return True
    return "UNEXPECTED_EOF" in (error.reason or "")  # of a plain SSLError in early releases of Python 3.11


class HandshakeFailure(enum.Enum):
    """The cause of a failed TLS handshake."""

    THEIR_KEY = enum.auto()  # the peer's key is not trusted here
    NO_KEY = enum.auto()  # the peer presented no key
    OUR_KEY = enum.auto()  # the peer does not trust this side's key
    VERSION = enum.auto()  # the peer does not speak TLS 1.3
    HUNG_UP = enum.auto()  # the peer closed the connection
    BROKEN = enum.auto()  # the peer did not follow the protocol


def handshake_failure(error: OSError) -> HandshakeFailure:
    """Classify the error of a failed handshake."""
    if is_cut(error) or isinstance(error, ssl.SSLZeroReturnError):
        return HandshakeFailure.HUNG_UP
    assert isinstance(error, ssl.SSLError)
    reason = error.reason or ""
    for reasons, meaning in (
        (_THEIR_KEY, HandshakeFailure.THEIR_KEY),
        (_NO_KEY, HandshakeFailure.NO_KEY),
        (_OUR_KEY, HandshakeFailure.OUR_KEY),
        (_VERSION, HandshakeFailure.VERSION),
    ):
        if reason.endswith(reasons):
            return meaning
    return HandshakeFailure.BROKEN


# Greet in both directions over a channel: whether the key is accepted, and the meaning of silence.

#: A mark, a version, flags, and the length of the following text.
_FORM = struct.Struct("<4sBBH")
_MARK, _GREETING_VERSION = b"mkl\n", 1
_STEADY, _REFUSED = 1, 2
#: The maximum length of an accepted text.
_LONGEST = 1000


class NoGreeting(Exception):
    """The data is not a greeting, or has another version. The message completes 'refused: '."""


class KeyRefused(Exception):
    """The other side does not accept this key. The message has its reason."""


def accept(steady: bool) -> bytes:
    """Encode a greeting. ``steady``: this process runs no user code, so its silence means a failure."""
    return _FORM.pack(_MARK, _GREETING_VERSION, _STEADY if steady else 0, 0)


def refuse(why: str) -> bytes:
    """Encode a greeting that refuses the key."""
    text = why.encode()[:_LONGEST]
    return _FORM.pack(_MARK, _GREETING_VERSION, _REFUSED, len(text)) + text


class Reader:
    """Reads the other side's greeting, and no bytes beyond it."""

    def __init__(self) -> None:
        self._got = b""
        #: Whether the other side runs no user code.
        self.steady = False

    def read(self, channel: TlsChannel) -> bool:
        """Read received data. Return whether the greeting is complete.

        Raises:
            NoGreeting: the data is not a greeting.
            KeyRefused: the greeting refuses this key.
            EOFError: the other side has hung up.
            OSError: the connection has failed.
        """
        try:
            while len(self._got) < _FORM.size:
                self._read(channel, _FORM.size - len(self._got))
            mark, version, flags, size = _FORM.unpack_from(self._got)
            if mark != _MARK or version != _GREETING_VERSION or size > _LONGEST:
                raise NoGreeting("it does not greet as a monarch_kernel of this version does")
            while len(self._got) < _FORM.size + size:
                self._read(channel, _FORM.size + size - len(self._got))
        except BlockingIOError:
            return False
        if flags & _REFUSED:
            text = self._got[_FORM.size :].decode(errors="replace")
            raise KeyRefused("".join(c if c.isprintable() else "?" for c in text))
        self.steady = bool(flags & _STEADY)
        return True

    def _read(self, channel: TlsChannel, size: int) -> None:
        data = channel.recv(size)
        if not data:
            raise EOFError
        self._got += data
