"""Identify the process at the other end of a Unix socket. Small processes load it: standard library only."""

from __future__ import annotations

import os
import socket
import struct

#: The process id, user and group of ``SO_PEERCRED``.
_UCRED = struct.Struct("3i")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Query the kernel for the process id and user id at the other end of a Unix socket."""
    pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def is_ours(uid: int) -> bool:
    """Return whether a process with this user id is allowed at the other end of a Unix socket."""
    return uid in (os.geteuid(), 0)
