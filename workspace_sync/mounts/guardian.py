"""Unmount a folder as soon as its server process has ended: a separate program that runs beside a mount.

Usage: ``python -I -S guardian.py PID MOUNTPOINT SOURCE FUSERMOUNT``. It imports only the standard library, starts in
milliseconds, outlives the server, and exits after unmounting. SOURCE is the name of the mount in the mount table. It
contains the pid and start time of the server, so no other mount is ever unmounted.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import sys

MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8


def unescaped(field: bytes) -> bytes:
    """Decode the octal escapes of a field of the mount table."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)


def source_at(mountpoint: bytes) -> bytes | None:
    """Return the source of the topmost mount at a path, without accessing the path."""
    found = None
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            before, _, after = line.partition(b" - ")
            if unescaped(before.split()[4]) == mountpoint:
                found = unescaped(after.split()[1])
    return found


def unmount(mountpoint: bytes, fusermount: str) -> str:
    """Unmount a path, even while it is in use; return the reason of a failure, or ""."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(mountpoint, MNT_DETACH | UMOUNT_NOFOLLOW) == 0:
        return ""
    number = ctypes.get_errno()
    if not fusermount:
        return os.strerror(number)
    read, write = os.pipe()
    arguments: list[str | bytes] = [fusermount, "-u", "-z", "-q", "--", mountpoint]
    files = [(os.POSIX_SPAWN_DUP2, write, 2)]
    pid = os.posix_spawn(fusermount, arguments, {"PATH": os.defpath}, file_actions=files)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        text = said.read().decode("utf-8", "replace").strip()
    _, status = os.waitpid(pid, 0)
    return "" if status == 0 else text or os.strerror(number)


def main(pid: int, mountpoint: bytes, source: bytes, fusermount: str) -> None:
    """Wait for the end of a process, then unmount its folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        process = -1
    print("ready", flush=True)
    if process >= 0:
        select.select([process], [], [])
    if source_at(mountpoint) == source:
        unmount(mountpoint, fusermount)


if __name__ == "__main__":
    main(int(sys.argv[1]), os.fsencode(sys.argv[2]), os.fsencode(sys.argv[3]), sys.argv[4])
