"""Messages between a rank and the process of a pipe: a kind, and a value whose large tensors are not copied into it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

from monarch_kernel.protocol.serialize import dumps

#: A value; the last one was sent; an exception ended the generator (its text); what was sent to it had failed.
VALUE, END, FAILED, LOST = range(4)
#: Kind, length of the body, number of buffers.
_HEAD = struct.Struct("<BQI")


class PipeClosed(Exception):
    """The other side has gone."""


def packed(kind: int, value: Any = None) -> list[Any]:
    """A message in pieces."""
    body, buffers = dumps(value)
    pieces = body if isinstance(body, list) else [body]
    size = sum(memoryview(piece).nbytes for piece in pieces)
    return [_HEAD.pack(kind, size, len(buffers)) + struct.pack(f"<{len(buffers)}Q", *buffers), *pieces]


def send(link: socket.socket, pieces: list[Any], wait: Callable[[bool], None] | None = None) -> None:
    """Send a message.

    Args:
        wait: called before each write; returns when the link can be written. None: the link blocks.

    Raises:
        PipeClosed: the other side has gone.
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
    """The next message: its kind, and what `loads` makes the value of.

    Args:
        wait: called before each read; returns when the link can be read. None: the link blocks.

    Raises:
        PipeClosed: the other side has gone.
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
