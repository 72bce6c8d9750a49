"""The first answer to a viewer, before the tools are loaded: they take longer than all the rest of joining."""

from __future__ import annotations

import os
import socket

from monarch_kernel.engines.hosted import wire


def entered(first: bytes) -> bytes:
    """The answer to a viewer's first message."""
    message = wire.decode(first)
    if not isinstance(message, wire.EnterRank):
        raise ValueError(f"a viewer began with a {type(message).__name__}")
    return wire.encode(wire.RankEntered(message.uid, message.rank, socket.gethostname(), os.getpid()))
