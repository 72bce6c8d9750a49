"""Identify the process at the other end of a Unix socket or loopback connection, with the standard library only.

Small processes load it.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Set

#: The process id, user and group of ``SO_PEERCRED``.
_UCRED = struct.Struct("3i")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Query the kernel for the process id and user id at the other end of a Unix socket."""
    pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def is_ours(uid: int) -> bool:
    """Return whether a process with this user id is allowed at the other end of a Unix socket."""
    return uid in (os.geteuid(), 0)


# Identify the user of the process at the other end of a loopback connection.

# All connections of this machine, with their owners; see proc(5).
_TCP = "/proc/net/tcp"
# Established, or with one direction ended: FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT.
_OPEN = {"01", "04", "05", "08"}


def is_own(connection: socket.socket) -> bool:
    """Return whether the process at the other end of an accepted loopback connection is this user's or root's.

    Every user of the machine can connect to a loopback port. Each listener on one therefore calls this before it does
    anything for a connection.
    """
    try:
        return belongs_to(connection.getpeername(), connection.getsockname(), {os.getuid(), 0})
    except OSError:  # it has ended
        return False


def belongs_to(peer: tuple[str, int], here: tuple[str, int], users: Set[int]) -> bool:
    """Return whether the process at the other end of a loopback connection runs as one of these users.

    Only an open connection that belongs to a process has an owner and an inode; the others are listed with uid 0.
    """
    wanted = [_hex(peer), _hex(here)]
    try:
        with open(_TCP) as table:
            next(table)
            for line in table:
                fields = line.split()
                if fields[1:3] == wanted:
                    state, uid, inode = fields[3], int(fields[7]), int(fields[9])
                    return state in _OPEN and inode != 0 and uid in users
    except (OSError, StopIteration):
        pass
    return False


def _hex(address: tuple[str, int]) -> str:
    number = int.from_bytes(socket.inet_aton(address[0]), "little")
    return f"{number:08X}:{address[1]:04X}"
