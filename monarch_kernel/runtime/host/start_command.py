"""The command line of a new process. This module imports little, for processes that only start another one."""

from __future__ import annotations

import os
import sys
from typing import Any

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

    flags: Any = getattr(subprocess, "_args_from_interpreter_flags", None)
    return flags() if flags is not None else []


def memfd(name: str, data: bytes) -> int:
    """Create an anonymous file with ``data``, positioned at its start."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
