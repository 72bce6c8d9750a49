"""Find the folders and files that processes of this user use on this host."""

from __future__ import annotations

import os


def resolved(fd: int) -> bytes:
    """Return the path of an open folder, without links, as the kernel shows it for other processes."""
    return os.readlink(b"/proc/self/fd/%d" % fd)


def working_folders() -> set[bytes]:
    """Return the working directories of processes."""
    return {folder for process in _processes() if (folder := _folder_of(process))}


def open_files(below: bytes) -> set[bytes]:
    """Return the files below a folder that other processes have open or mapped.

    Args:
        below: the folder (``resolved``).
    """
    own = b"/proc/%d" % os.getpid()
    return {path for process in _processes() if process != own for path in _files_of(process, below + b"/")}


def users_of(below: bytes) -> list[str]:
    """Describe the other processes that work in a folder, or have files in it open or mapped, for messages.

    Args:
        below: the folder (``resolved``).
    """
    found: list[str] = []
    inside = below + b"/"
    for process in _processes():
        pid = int(process.rpartition(b"/")[2])
        uses = pid != os.getpid() and (_folder_of(process).startswith(inside) or _files_of(process, inside))
        if uses:
            found.append(f"process {pid} ({_command(process)})")
    return found


def _folder_of(process: bytes) -> bytes:
    """Return the working directory of a process; empty if it has ended or belongs to another user."""
    try:
        return os.readlink(process + b"/cwd")
    except OSError:
        return b""


def _files_of(process: bytes, inside: bytes) -> set[bytes]:
    """Return the files with a path prefix that a process has open or mapped, as far as this user can see them."""
    found: set[bytes] = set()
    try:
        with open(process + b"/maps", "rb") as maps:
            found.update(line[at:].rstrip(b"\n") for line in maps if (at := line.find(inside)) >= 0)
        for name in os.listdir(process + b"/fd"):
            try:
                found.add(os.readlink(process + b"/fd/" + name))
            except OSError:
                continue
    except OSError:
        pass
    return {path for path in found if path.startswith(inside)}


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
