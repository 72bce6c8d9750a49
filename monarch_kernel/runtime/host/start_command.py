"""The command line of a new process. This module imports little, for processes that only start another one."""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from monarch_kernel.protocol.messages import ProcRef

# The configuration that a controller passes to the host agent that it starts.


class AgentConfig(msgspec.Struct, array_like=True):
    """The agent's configuration, read from its standard input: a length in four bytes, then MessagePack.

    Standard input is a socket that the controller keeps open. The socket closes when the controller dies or wants
    the agent to end.
    """

    id: str
    run_dir: str
    host: str
    owner: ProcRef
    owner_pid: int
    lock_fd: int  # the run folder's lock, inherited
    python_path: str | None  # the controller's PYTHONPATH; the agent itself runs with another
    sys_path: list[str]
    descriptors: int  # the number of descriptors that a user process may open


# Describe how a process ended. This module imports little, because controllers load it, too.

_SIGNAL_NAMES = {
    signal.SIGSEGV: "segmentation fault (SIGSEGV)",
    signal.SIGABRT: "aborted (SIGABRT)",
    signal.SIGBUS: "bus error (SIGBUS)",
    signal.SIGFPE: "arithmetic error (SIGFPE)",
    signal.SIGILL: "illegal instruction (SIGILL)",
}


def describe_exit(status: int, out_of_memory: str = "", max_rss_bytes: int = 0) -> str:
    """Describe in one phrase how a process ended.

    Args:
        status: the exit code, or minus the signal.
        out_of_memory: where memory ran out, see ``OomMonitor``; "" if it did not.
        max_rss_bytes: the process's peak memory.
    """
    if status >= 0:
        return f"exited with code {status}"
    try:
        number = signal.Signals(-status)
    except ValueError:
        return f"killed by signal {-status}"
    text = _SIGNAL_NAMES.get(number, f"killed by {number.name}")
    if number is signal.SIGKILL and out_of_memory:
        used = f"; it had used {max_rss_bytes / 1e9:.2f} GB" if max_rss_bytes else ""
        text += f", out of memory ({out_of_memory}{used})"
    return text


_LEAN = "import gc; gc.disable(); from monarch_kernel.loading import load_msgspec; load_msgspec()"
#: Interpreter flags to pass on. If none is set, nothing has to be imported to find out.
_FLAGS = (
    *("debug", "optimize", "dont_write_bytecode", "no_site", "verbose", "bytes_warning", "quiet"),
    *("isolated", "ignore_environment", "no_user_site", "dev_mode"),
)


def interpreter_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``main`` of one of this package's modules in an interpreter like this one."""
    # -m would load more than is needed. Garbage collection is off while modules load.
    start = f"{_LEAN}; from {module} import main; main()"
    # -P: a file in the working directory must not shadow a module of the library.
    return [sys.executable, *_flags(), "-P", "-c", start, *arguments]


def _flags() -> list[str]:
    """Return the flags that this interpreter was started with."""
    if not (any(getattr(sys.flags, name) for name in _FLAGS) or sys.warnoptions or sys._xoptions):
        return []
    import subprocess

    flags = getattr(subprocess, "_args_from_interpreter_flags", None)
    return flags() if flags is not None else []


def memfd(name: str, data: bytes) -> int:
    """Create an anonymous file with ``data``, positioned at its start."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
