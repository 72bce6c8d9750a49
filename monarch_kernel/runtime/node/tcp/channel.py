"""A TCP socket with TLS on it, for a ``Link`` to send and receive through.

OpenSSL's objects belong to one thread at a time, though Python lets go of its lock while it is in them: so there is a
lock for each channel, held for a few records at a time.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import Any

#: The most that one record of TLS holds.
RECORD = 16 * 1024
#: How much is sent before another thread may use the channel.
_TURN = 256 * 1024

#: Sockets that a fork must let go of, or the connections would outlive the process that made them.
_held: set[socket.socket] = set()


def hold(sock: socket.socket) -> None:
    """From now on a fork of this process closes its copy of this socket."""
    _held.add(sock)


def let_go(sock: socket.socket) -> None:
    """Close a socket."""
    _held.discard(sock)
    sock.close()


def _after_fork() -> None:
    for sock in list(_held):
        sock.close()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


class TlsChannel:
    """An encrypted connection; non-blocking.

    ``send``, ``sendmsg``, ``recv`` and ``recv_into`` are those of a socket: they raise ``BlockingIOError`` where there
    is nothing to be done yet, and other kinds of ``OSError`` (``ssl.SSLError`` is one) when the connection has failed.
    The end of what comes is empty only after the other side's goodbye; a connection that was cut off is an error.

    Args:
        sock: a connected socket, which is the channel's from now on.
        context: see ``Keys``.
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
        self._held: bytes | None = None  # what the record holds that is on its way

    def handshake(self) -> bool:
        """Go on with the handshake; whether it is done.

        Raises:
            OSError: it has failed.
        """
        with self._lock:
            try:
                self._sock.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            return True

    def certificate(self) -> bytes:
        """What the other side has proved to be its own (DER); after the handshake."""
        return self._sock.getpeercert(binary_form=True) or b""

    # -- as a socket --------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._sock.fileno()

    def setblocking(self, _flag: bool) -> None:
        """It never blocks."""

    def send(self, data: Any) -> int:
        """Send the beginning of this; how much of it."""
        return self.sendmsg([memoryview(data)])

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        """Send the beginning of these; how much of them. What was refused must be offered again, and first."""
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
            # It is encrypted already, and must be the next to go, as it is.
            self._held = bytes(data)
            raise BlockingIOError from None
        self._held = None
        return sent

    def recv(self, size: int) -> bytes:
        """What has come, of one record; empty after a goodbye."""
        with self._lock:
            try:
                return self._sock.recv(min(size, RECORD))
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def recv_into(self, view: memoryview) -> int:
        """As ``recv``; how much it was."""
        with self._lock:
            try:
                return self._sock.recv_into(view)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def pending(self) -> int:
        """How much of a record was decrypted and not received yet, of which the kernel knows nothing."""
        with self._lock:
            return self._sock.pending()

    # -- below TLS ------------------------------------------------------------------------------------

    def peek(self) -> bytes:
        """The first bytes that have arrived and are unread, as they are on the wire; not during sends.

        Raises:
            OSError: there are none (``BlockingIOError``), or the connection has failed.
        """
        return socket.socket.recv(self._sock, 3, socket.MSG_PEEK)

    def discard(self) -> bool:
        """Throw away some of what has come; whether more may come.

        Raises:
            OSError: there is nothing (``BlockingIOError``), or the connection has failed.
        """
        return bool(socket.socket.recv(self._sock, 65536))

    def info(self) -> bytes:
        """What the kernel knows of the connection (``struct tcp_info``)."""
        return self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)

    # -- ending ---------------------------------------------------------------------------------------

    def say_goodbye(self) -> bool:
        """Tell the other side that this is the end, and that nothing was cut off; False if it must be tried again.

        Raises:
            OSError: the connection has failed.
        """
        with self._lock:
            try:
                self._sock.unwrap()
            except ssl.SSLWantWriteError:
                return False
            except (ssl.SSLWantReadError, ValueError, ssl.SSLError):
                pass  # it is said, and the answer does not matter; or there was no handshake
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
            return True

    def close(self) -> None:
        """Close the connection at once. What was sent before may be lost if something has come and was not read."""
        with self._lock:  # or another thread would go on with a descriptor that has been reused by then
            let_go(self._sock)


def _records(views: Sequence[memoryview]) -> Iterator[Any]:
    """The bytes of all views in pieces that fill a record; copied only across views."""
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


# -- what was wrong -----------------------------------------------------------------------------------

#: The first bytes of TLS: a record of a handshake or an alert, and the major version.
_TLS = (b"\x16\x03", b"\x15\x03")
#: How ZeroMQ begins, which links went over until wire version 4.
_ZMTP = b"\xff"

#: Reasons of OpenSSL that mean: the other side's certificate is none that this one trusts, or none was shown.
_THEIR_KEY = ("CERTIFICATE_VERIFY_FAILED",)
_NO_KEY = ("PEER_DID_NOT_RETURN_A_CERTIFICATE",)
#: Alerts of the other side that mean: it does not trust this one's.
_OUR_KEY = ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "CERTIFICATE_REQUIRED", "UNSUPPORTED_CERTIFICATE")
_VERSION = ("UNSUPPORTED_PROTOCOL", "PROTOCOL_VERSION", "VERSION_TOO_LOW", "WRONG_VERSION_NUMBER", "WRONG_SSL_VERSION")


def speaks(first: bytes) -> str:
    """What the first bytes of a connection are: "TLS", "ZeroMQ", or "" for anything else."""
    if any(first[: len(tls)] == tls[: len(first)] for tls in _TLS):
        return "TLS"
    return "ZeroMQ" if first.startswith(_ZMTP) else ""


def judge(error: OSError) -> str:
    """What a failed handshake means.

    Returns:
        "their key" (it is not trusted here), "no key" (they have shown none), "our key" (they do not trust it),
        "version" (no TLS 1.3), "hung up", or "" if the protocol was broken.
    """
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "hung up"
    reason = error.reason or ""
    for reasons, meaning in (
        (_THEIR_KEY, "their key"),
        (_NO_KEY, "no key"),
        (_OUR_KEY, "our key"),
        (_VERSION, "version"),
    ):
        if reason.endswith(reasons):
            return meaning
    return "hung up" if "UNEXPECTED_EOF" in reason else ""
