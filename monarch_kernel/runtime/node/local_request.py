"""Send one request to a process of this user on this machine, from a program that is not a node.

The other process accepts the request on a link without a Hello (``node._STRANGERS``), and answers with a Reply.
"""

from __future__ import annotations

import socket

from monarch_kernel.protocol.messages import PREFIX, Message, Reply, decode, encode
from monarch_kernel.runtime.node.link import check_peer


def connect(address: str, timeout: float) -> socket.socket:
    """Connect to a Unix socket of a process of this user, or of root, which has access to everything anyway.

    Raises:
        OSError: no process listens on it, or a process of another user does.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout)
        sock.connect(address)
        check_peer(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def request(address: str, message: Message, timeout: float) -> tuple[Reply, bytes]:
    """Send a message, and wait for the Reply. Return it with its body.

    Args:
        timeout: the time limit for each step (seconds).

    Raises:
        TimeoutError: the process does not answer.
        OSError: it cannot be reached, or has closed the connection.
    """
    with connect(address, timeout) as sock:
        header = encode(message)
        sock.sendall(PREFIX.pack(len(header), 0) + header)
        length, size = PREFIX.unpack(_exactly(sock, PREFIX.size))
        reply = decode(_exactly(sock, length))
        body = _exactly(sock, size)
    if not isinstance(reply, Reply):
        raise ConnectionResetError("it sent something other than an answer")
    return reply, body


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it closed the connection")
        data += more
    return bytes(data)
