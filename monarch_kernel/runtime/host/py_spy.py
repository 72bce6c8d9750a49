"""How py-spy is called, for ranks of ours and for processes that others have started. Standard library only."""

from __future__ import annotations

import os
import shutil
import sys

#: The form of a dump: JSON, with whole paths.
JSON = ("--json", "--full-filenames")
MISSING = "py-spy is not installed there (pip install py-spy), so its stack cannot be read from outside"

_STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "D": "it waits for a disk or a device, and cannot be interrupted",
}


def program() -> str | None:
    """The program, as installed beside this interpreter, or on the path; None if it is missing."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def state_of(pid: int) -> str:
    """Why a process cannot answer, by its state in the kernel; '' if the state does not explain it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return state_of_letter(file.read().rpartition(b")")[2].split()[0].decode())
    except (OSError, IndexError):
        return ""


def state_of_letter(letter: str) -> str:
    """Why a process in this state of the kernel, such as T, cannot answer; '' if the state does not explain it."""
    return _STATES.get(letter, "")


def ways(native: bool, stopped: bool) -> list[tuple[str, ...]]:
    """The options with which a process is read, and those that are tried if that fails.

    py-spy must pause a process to read native frames, and cannot pause one that is already stopped. It can read Python
    frames while the process runs; if that fails, it retries with the process paused.
    """
    if stopped:
        return [("--nonblocking",)]
    return [("--native",), ("--nonblocking",)] if native else [("--nonblocking",), ()]


def is_whole(dump: str) -> bool:
    """Whether a dump ends where it should."""
    return dump.lstrip().startswith("[") and dump.rstrip().endswith("]")


def plain_error(said: str) -> str:
    """What py-spy says on its standard error, without the stack of its own code."""
    return said.partition("\nStack backtrace:")[0].strip()
