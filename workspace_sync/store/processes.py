"""What processes of this user are using on this host: the folders in which they work, the files that they have open."""

from __future__ import annotations

import os


def resolved(fd: int) -> bytes:
    """The path of an open folder, without links: as the kernel shows it for other processes."""
    return os.readlink(b"/proc/self/fd/%d" % fd)


def working_folders() -> set[bytes]:
    """The folders in which processes work."""
    found: set[bytes] = set()
    for process in _processes():
        try:
            found.add(os.readlink(process + b"/cwd"))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def open_files(below: bytes) -> set[bytes]:
    """The files below a folder that other processes have open or mapped.

    Args:
        below: the folder (``resolved``).
    """
    found: set[bytes] = set()
    inside = below + b"/"
    own = b"/proc/%d" % os.getpid()
    for process in _processes():
        if process == own:
            continue
        try:
            with open(process + b"/maps", "rb") as maps:
                found.update(line[at:].rstrip(b"\n") for line in maps if (at := line.find(inside)) >= 0)
            for name in os.listdir(process + b"/fd"):
                try:
                    target = os.readlink(process + b"/fd/" + name)
                except OSError:
                    continue
                if target.startswith(inside):
                    found.add(target)
        except OSError:
            continue
    return found


def _processes() -> list[bytes]:
    return [b"/proc/" + os.fsencode(name) for name in os.listdir("/proc") if name.isdigit()]
