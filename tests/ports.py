"""TCP ports for processes that must be told which one to listen on."""

from __future__ import annotations

import socket

_reserved: list[socket.socket] = []


def free_port() -> int:
    """A port of the loopback address that no other process gets by chance before the one that is to listen there.

    A socket of this process stays bound to it, without listening. So the system gives the port to nobody who asks for
    any, and refuses connections, while a server that names it can listen: servers set SO_REUSEADDR.
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    _reserved.append(sock)
    return int(sock.getsockname()[1])
