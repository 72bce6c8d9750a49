"""Messages between a rank and the process of a pipe: a kind and a value, whose large tensors are not copied."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

from monarch_kernel.protocol.serialize import dumps

#: A value; the end of the values; the text of an exception that ended the generator; a sent value that had failed.
VALUE, END, FAILED, LOST = range(4)
#: The kind, the length of the body, and the number of buffers.
_HEAD = struct.Struct("<BQI")


class PipeClosed(Exception):
    """The other side has closed the pipe."""


def packed(kind: int, value: Any = None) -> list[object]:
    """Encode a message in pieces."""
    body, buffers = dumps(value)
    pieces = body if isinstance(body, list) else [body]
    size = sum(memoryview(piece).nbytes for piece in pieces)
    return [_HEAD.pack(kind, size, len(buffers)) + struct.pack(f"<{len(buffers)}Q", *buffers), *pieces]


def send(link: socket.socket, pieces: list[Any], wait: Callable[[bool], None] | None = None) -> None:
    """Send a message.

    Args:
        wait: called before each write; returns when the link is writable. None: the link is blocking.

    Raises:
        PipeClosed: the other side has closed the pipe.
    """
    try:
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            while rest:
                if wait is not None:
                    wait(True)
                rest = rest[link.send(rest) :]
    except OSError as e:
        raise PipeClosed from e


def receive(link: socket.socket, wait: Callable[[bool], None] | None = None) -> tuple[int, bytearray, tuple[int, ...]]:
    """Receive the next message: its kind, and the arguments of `loads` for its value.

    Args:
        wait: called before each read; returns when the link is readable. None: the link is blocking.

    Raises:
        PipeClosed: the other side has closed the pipe.
    """

    def read(size: int) -> bytearray:
        found = bytearray(size)
        rest = memoryview(found)
        while rest:
            if wait is not None:
                wait(False)
            try:
                count = link.recv_into(rest)
            except OSError as e:
                raise PipeClosed from e
            if not count:
                raise PipeClosed
            rest = rest[count:]
        return found

    kind, size, count = _HEAD.unpack(read(_HEAD.size))
    buffers = struct.unpack(f"<{count}Q", read(8 * count))
    return kind, read(size), buffers
