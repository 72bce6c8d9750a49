"""A link: one Unix stream socket between two processes, with framing in both directions."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from monarch_kernel.protocol.messages import PREFIX, decode, encode
from monarch_kernel.runtime.node.poller import EPOLLIN, EPOLLOUT, Poller

_HEAD = PREFIX.size
_pack = PREFIX.pack
_unpack_from = PREFIX.unpack_from
#: One recv takes at most this much; below malloc's mmap threshold, so the buffer costs nothing.
_CHUNK = 64 * 1024
#: Messages up to this size are joined into one piece before sending.
_JOIN = 32 * 1024
_UCRED = struct.Struct("3i")
_HANGUP = select.EPOLLHUP | select.EPOLLERR

Pieces = list[Any]


class Link:
    """Sends and receives whole messages over a socket; may exist before its socket does.

    A link made before the peer has connected queues what is sent, and flushes when ``attach`` gives it
    its socket. ``send`` may be called from any thread. ``on_message(link, header, body)`` and
    ``on_close(link)`` are called by the thread that polls.
    """

    __slots__ = (
        "_big",
        "_big_at",
        "_big_header",
        "_lock",
        "_moved",
        "_out",
        "_poller",
        "_rest",
        "_sock",
        "closed",
        "on_close",
        "on_message",
        "peer",
        "pid",
        "queued",
    )

    def __init__(
        self,
        poller: Poller,
        peer: str,
        on_message: Callable[[Link, Any, Any], None],
        on_close: Callable[[Link], None],
    ) -> None:
        self._poller = poller
        self.peer = peer
        self.pid = 0
        self.on_message = on_message
        self.on_close = on_close
        self.closed = False
        self.queued = 0  # bytes not yet accepted by the kernel
        self._sock: socket.socket | None = None
        self._out: deque[Any] = deque()
        self._lock = threading.RLock()
        self._moved: Link | None = None
        self._rest = b""
        self._big: bytearray | None = None
        self._big_at = 0
        self._big_header: Any = None

    def attach(self, sock: socket.socket) -> None:
        """Take the socket, send what was queued, and begin to receive."""
        sock.setblocking(False)
        with self._lock:
            if self._sock is not None or self.closed:  # another thread has heard of the peer at the same time
                sock.close()
                return
            self._sock = sock
            self._poller.register(sock.fileno(), self._on_event)
            self._flush()

    def take_over(self, waiting: Link) -> None:
        """Send what ``waiting``, a link without a socket to the same peer, has queued, and stand for it from now on."""
        with waiting._lock, self._lock:
            self._out.extend(waiting._out)
            self.queued += waiting.queued
            waiting._out.clear()
            waiting._moved = self
            self._flush()

    @property
    def attached(self) -> bool:
        """Whether there is a socket."""
        return self._sock is not None

    # -- sending --------------------------------------------------------------------------------

    def send(self, header: bytes, body: Any = b"") -> None:
        """Queue or send one message. ``body`` is bytes-like, or a list of bytes-like pieces.

        The pieces are not kept after this returns: what the kernel did not take is copied.
        """
        if type(body) is list:
            size = sum(memoryview(piece).nbytes for piece in body)
            self._send_pieces([_pack(len(header), size) + header, *body], size)
            return
        size = len(body)
        if size > _JOIN:
            self._send_pieces([_pack(len(header), size) + header, body], size)
            return
        data = _pack(len(header), size) + header + body
        with self._lock:
            if self.closed:
                return
            if self._moved is not None:
                self._moved.send(header, body)
                return
            if self._poller.late and self._sock is not None:  # else it would come before our Hello
                data = self._late() + data
            if self._out or self._sock is None:
                self._queue(data)
                return
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the reading side will see the end of the link
            if sent != len(data):
                self._queue(data[sent:])
                self._poller.modify(self._sock.fileno(), EPOLLIN | EPOLLOUT)

    def _late(self) -> bytes:
        """Frames of what waited for a message that it can go with."""
        return b"".join(_pack(len(header), 0) + header for header in map(encode, self._poller.late_for(self.peer)))

    def _queue(self, data: Any) -> None:
        self._out.append(memoryview(data))
        self.queued += len(data)

    def _send_pieces(self, pieces: Pieces, size: int) -> None:
        views = [memoryview(p).cast("B") for p in pieces if memoryview(p).nbytes]
        # A large message takes several system calls: an interrupt between them would cut it in two.
        with self._poller.shielded(), self._lock:
            if self.closed:
                return
            if self._moved is not None:
                self._moved._send_pieces(pieces, size)
                return
            if self._poller.late and (late := self._late()):
                views.insert(0, memoryview(late))
            if not self._out and self._sock is not None:
                while views:
                    try:
                        sent = self._sock.sendmsg(views[:64])
                    except BlockingIOError:
                        break
                    except OSError:
                        return
                    while views and sent >= views[0].nbytes:
                        sent -= views[0].nbytes
                        views.pop(0)
                    if sent:
                        views[0] = views[0][sent:]
                if not views:
                    return
                self._poller.modify(self._sock.fileno(), EPOLLIN | EPOLLOUT)
            for view in views:
                self._queue(bytes(view))

    def _flush(self) -> None:
        """Send what is queued; the lock is held."""
        sock = self._sock
        if sock is None:
            return
        out = self._out
        while out:
            try:
                sent = sock.sendmsg([out[i] for i in range(min(len(out), 64))])
            except BlockingIOError:
                self._poller.modify(sock.fileno(), EPOLLIN | EPOLLOUT)
                return
            except OSError:
                return
            self.queued -= sent
            while out and sent >= len(out[0]):
                sent -= len(out.popleft())
            if sent:
                out[0] = out[0][sent:]
        self._poller.modify(sock.fileno(), EPOLLIN)

    # -- receiving ------------------------------------------------------------------------------

    def _on_event(self, events: int) -> None:
        if events & EPOLLOUT:
            with self._lock:
                if not self.closed:
                    self._flush()
        if events & (EPOLLIN | _HANGUP):
            self.receive()

    def receive(self) -> bool:
        """Handle what one ``recv`` gives. False at the end of the link or when nothing was there."""
        sock = self._sock
        if sock is None or self.closed:
            return False
        if self._big is not None:
            return self._receive_big(sock)
        try:
            data = sock.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at = 0
        end = len(data)
        view = memoryview(data)
        on_message = self.on_message
        while end - at >= _HEAD:
            header_size, body_size = _unpack_from(data, at)
            body_at = at + _HEAD + header_size
            after = body_at + body_size
            if after > end:
                if after - at > _CHUNK and body_at <= end:
                    self._begin_big(decode(view[at + _HEAD : body_at]), view[body_at:], body_size)
                    return True
                break
            header = decode(view[at + _HEAD : body_at])
            at = after
            on_message(self, header, view[body_at:after])
            if self.closed:
                return False
        if at < end:
            self._rest = data[at:]
        return True

    def _begin_big(self, header: Any, have: memoryview, size: int) -> None:
        big = bytearray(size)
        big[: len(have)] = have
        self._big, self._big_at, self._big_header = big, len(have), header

    def _receive_big(self, sock: socket.socket) -> bool:
        big = self._big
        assert big is not None
        with memoryview(big) as view:
            while self._big_at < len(big):
                try:
                    got = sock.recv_into(view[self._big_at :])
                except BlockingIOError:
                    return False
                except OSError:
                    got = 0
                if not got:
                    self.close()
                    return False
                self._big_at += got
        header, self._big, self._big_header = self._big_header, None, None
        self.on_message(self, header, memoryview(big))
        return True

    def drain(self) -> None:
        """Handle everything that has already arrived; for a peer known to be dead."""
        while self.receive():
            pass

    # -- ending -----------------------------------------------------------------------------------

    def peer_uid(self) -> int:
        """The user id of the process at the other end, as the kernel knows it."""
        assert self._sock is not None
        self.pid, uid = peer_of(self._sock)
        return uid

    def close(self) -> None:
        """Close the socket and tell ``on_close``; later sends go nowhere."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._out.clear()
            self.queued = 0
            if self._sock is not None:
                self._poller.unregister(self._sock.fileno())
                self._sock.close()
        self.on_close(self)

    def abandon(self) -> None:
        """In a fork of this process: close the descriptor, which leaves the connection to the other one."""
        self.closed = True
        if self._sock is not None:
            self._sock.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "up" if self._sock is not None else "waiting"
        return f"<Link to {self.peer or '?'} {state}>"


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id at the other end of a Unix socket, as the kernel knows them."""
    pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def listen_unix(path: str) -> socket.socket:
    """A listening Unix socket at ``path``; the folder's mode 0700 keeps others out."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    sock.bind(path)
    os.chmod(path, 0o600)
    sock.listen(4096)
    return sock


def connect_unix(path: str) -> socket.socket:
    """Connect to a Unix socket.

    Raises:
        OSError: nobody listens there (``FileNotFoundError``, ``ConnectionRefusedError``).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock
