"""Run py-spy, on ranks of this package and on processes of other programs."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import NamedTuple

from monarch_kernel import programs

#: The options for a dump: JSON, with full paths.
JSON = ("--json", "--full-filenames")
MISSING = "py-spy is not installed there (pip install py-spy), so its stack cannot be read from outside"

_STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "D": "it waits for a disk or a device, and cannot be interrupted",
}


def program() -> str | None:
    """Return the program, as installed beside this interpreter, or on the path; None if it is missing."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    if os.access(beside, os.X_OK):
        return beside
    import shutil  # agents, which load this module when they start, need it only here

    return shutil.which("py-spy")


def state_of(pid: int) -> str:
    """Return why a process cannot answer, by its state in the kernel; '' if the state does not explain it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return state_of_letter(file.read().rpartition(b")")[2].split()[0].decode())
    except (OSError, IndexError):
        return ""


def state_of_letter(letter: str) -> str:
    """Return why a process in this state of the kernel, such as T, cannot answer.

    '' if the state does not explain it.
    """
    return _STATES.get(letter, "")


def ways(native: bool, stopped: bool) -> list[tuple[str, ...]]:
    """Return the options for reading a process, in the order in which they are tried.

    py-spy must pause a process to read native frames, and cannot pause one that is already stopped. It can read Python
    frames while the process runs; if that fails, it retries with the process paused.
    """
    if stopped:
        return [("--nonblocking",)]
    return [("--native",), ("--nonblocking",)] if native else [("--nonblocking",), ()]


def is_whole(dump: str) -> bool:
    """Return whether a dump is complete."""
    return dump.lstrip().startswith("[") and dump.rstrip().endswith("]")


def plain_error(said: str) -> str:
    """Return py-spy's error message, without the stack of its own code."""
    return said.partition("\nStack backtrace:")[0].strip()


class SpyRead(NamedTuple):
    """The result of reading a process with py-spy.

    Attributes:
        dump: its JSON; "" if there is none.
        said: its last output if there is no dump.
        trouble: why it did not finish; "" if it did.
    """

    dump: str
    said: str = ""
    trouble: str = ""


def read(pid: int, native: bool, stopped: bool, timeout: float, *options: str) -> SpyRead:
    """Read the stacks of a process of this machine, trying all ways in order.

    Args:
        native: include native frames.
        stopped: whether the process is stopped, and stays so.
        timeout: the time limit for all ways together (seconds).
        options: further options of ``py-spy dump``.
    """
    import subprocess  # a host agent, which loads this module, starts py-spy in another way

    found = program()
    if found is None:
        return SpyRead("", trouble=MISSING)
    said = ""
    deadline = time.monotonic() + timeout
    for way in ways(native, stopped):
        command = [found, "dump", *JSON, *options, *way, "--pid", str(pid)]
        try:
            done = programs.run(
                command, capture_output=True, stdin=subprocess.DEVNULL, timeout=max(0.1, deadline - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            if not stopped and state_of(pid) == _STATES["T"]:  # if py-spy was killed, it may leave the process stopped
                os.kill(pid, signal.SIGCONT)
            return SpyRead("", said, f"py-spy did not read its stack within {timeout:g} s")
        except OSError as error:
            return SpyRead("", said, f"py-spy could not be started: {error}")
        dump = done.stdout.decode("utf-8", "replace")
        if is_whole(dump):
            return SpyRead(dump)
        said = plain_error(done.stderr.decode("utf-8", "replace"))
    return SpyRead("", said)
