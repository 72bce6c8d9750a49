"""Find out which folders and files processes of this user use on this host."""

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


def users_of(below: bytes) -> list[str]:
    """The other processes that work in a folder or have files in it open or mapped, for messages.

    Args:
        below: the folder (``resolved``).
    """
    found: list[str] = []
    inside = below + b"/"
    for process in _processes():
        pid = int(process.rpartition(b"/")[2])
        if pid != os.getpid() and _uses(process, inside):
            found.append(f"process {pid} ({_command(process)})")
    return found


def _uses(process: bytes, inside: bytes) -> bool:
    try:
        if os.readlink(process + b"/cwd").startswith(inside):
            return True
        with open(process + b"/maps", "rb") as maps:
            if any(inside in line for line in maps):
                return True
        for name in os.listdir(process + b"/fd"):
            try:
                if os.readlink(process + b"/fd/" + name).startswith(inside):
                    return True
            except OSError:
                continue
    except OSError:  # it has ended, or belongs to another user
        pass
    return False


def _command(process: bytes) -> str:
    try:
        with open(process + b"/cmdline", "rb") as file:
            words = file.read(4096).decode("utf-8", "replace").split("\0")
    except OSError:
        return "it has just ended"
    said = " ".join([os.path.basename(words[0]), *words[1:]]).strip()
    return said if len(said) <= 60 else said[:59] + "…"


def _processes() -> list[bytes]:
    return [b"/proc/" + os.fsencode(name) for name in os.listdir("/proc") if name.isdigit()]
