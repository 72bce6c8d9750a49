"""Accept connections at a listening socket, even when the process runs out of descriptors."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import Any

from monarch_kernel import logs
from monarch_kernel.protocol.private_files import remove_socket
from monarch_kernel.runtime.node import descriptors
from monarch_kernel.runtime.node.poller import Poller

log = logs.logger(__name__)

#: The pause in accepting when the process has no descriptor left (seconds).
ACCEPT_PAUSE = 1.0
#: The number of connections accepted before other descriptors get their turn.
_BATCH = 64


class Acceptor:
    """Calls ``on_socket(socket, address)`` for each connection, on the polling thread.

    Args:
        what: the listener's name, for the log.
        make_room: called when no descriptor is left; returns whether it has closed one.
    """

    def __init__(
        self,
        poller: Poller,
        sock: socket.socket,
        what: str,
        on_socket: Callable[[socket.socket, Any], None],
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self._poller = poller
        self._sock = sock
        self._what = what
        self._on_socket = on_socket
        self._make_room = make_room
        self._closed = False
        self._short = False
        poller.register(sock.fileno(), self._accept)

    def _accept(self, _events: int) -> None:
        for _ in range(_BATCH):
            try:
                sock, address = self._sock.accept()
            except OSError as e:
                if e.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    return
                if (e.errno == errno.EMFILE and descriptors.raise_limit()) or self._make_room():
                    continue
                if not self._short:
                    self._short = True
                    log.error("%s cannot accept more connections: %s (see ulimit -n)", self._what, e.strerror)
                self._poller.unregister(self._sock.fileno())  # otherwise epoll would report it again at once
                self._poller.call_later(ACCEPT_PAUSE, self._again)
                return
            self._short = False
            self._on_socket(sock, address)
            if self._closed:
                return

    def _again(self) -> None:
        if not self._closed:
            self._poller.register(self._sock.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more connections."""
        if not self._closed:
            self._closed = True
            self._poller.unregister(self._sock.fileno())
            self._sock.close()

    def abandon(self) -> None:
        """Leave the socket to the parent, in a forked child."""
        self._closed = True
        self._sock.close()


class UnixListener:
    """An additional Unix socket that accepts links, with its name in the file system."""

    def __init__(self, acceptor: Acceptor, path: str) -> None:
        self._acceptor = acceptor
        self._path = path
        about = os.lstat(path)
        self._inode = (about.st_dev, about.st_ino)

    def close(self) -> None:
        """Accept no more connections, and remove the socket's name."""
        self._acceptor.close()
        remove_socket(self._path, self._inode)  # unless a successor listens there by now

    def abandon(self) -> None:
        """See ``Acceptor.abandon``."""
        self._acceptor.abandon()
