"""What attackers do to links over TCP: strangers, a person on the path, and holders of a key.

The tests use these at small counts; ``python -m tests.attacks`` runs them by the ten thousand against a real worker.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

#: How links began until wire version 4: ZeroMQ's greeting, with CURVE; and with no security at all, and a message.
ZMTP_CURVE = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO\x01\x00"
ZMTP_NULL = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x19\x05READY\x00\x01x"


def record(kind: int, body: bytes, length: int = -1) -> bytes:
    """A record of TLS; ``length``: what it says of itself."""
    return struct.pack(">BHH", kind, 0x0301, len(body) if length < 0 else length) + body


#: A hello that announces 16 MiB, in a record that is a right one.
GIANT_HELLO = record(22, b"\x01\xff\xff\xff" + bytes(1000))


def wrong_hello() -> bytes:
    """A hello with all that belongs there by its lengths, of noise."""
    body = b"\x03\x03" + os.urandom(32) + b"\x20" + os.urandom(32) + b"\x00\x02\x13\x01\x01\x00"
    extensions = os.urandom(4) + b"\x00\x10" + os.urandom(16)
    body += len(extensions).to_bytes(2, "big") + extensions
    return record(22, b"\x01" + len(body).to_bytes(3, "big") + body)


def hang_up_of(sock: socket.socket) -> bytes:
    """All that comes until the other side has hung up.

    Raises:
        TimeoutError: it does not, within the socket's timeout.
    """
    got = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while data := sock.recv(65536):
            got += data
    return got
