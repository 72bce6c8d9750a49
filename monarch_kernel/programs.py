"""Start programs, always from a list of arguments and never through a shell.

All code of this project starts programs here. Any of its packages may import this module; it imports none of them.
Functions import ``subprocess`` when they need it, because loading it takes milliseconds.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Collection
    from typing import IO, TypedDict, Unpack

    class _Options(TypedDict, total=False):
        """Options of ``start``: those of ``subprocess.Popen`` that neither select another program nor run code."""

        stdin: int | IO[Any] | None
        stdout: int | IO[Any] | None
        stderr: int | IO[Any] | None
        cwd: str | None
        env: Mapping[str, str] | None
        pass_fds: Collection[int]
        start_new_session: bool

    class _RunOptions(_Options, total=False):
        """Options of ``run``: those of ``start``, and some of ``subprocess.run``."""

        input: str | bytes | None
        capture_output: bool
        errors: str
        timeout: float
        check: bool


PACKAGE = os.path.dirname(os.path.abspath(__file__))
"""The folder of this package."""

ROOT = os.path.dirname(PACKAGE)
"""The folder that contains this package. Child processes get it on their import path."""


def own_command() -> list[str]:
    """Return the command line that runs this package as imported here. The package need not be installed."""
    start = f"import sys; sys.path.insert(0, {ROOT!r}); from monarch_kernel.__main__ import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", start]


def start(command: Sequence[str | bytes], **options: Unpack[_Options]) -> subprocess.Popen[bytes]:
    """Start a program.

    Args:
        command: its path or name, and its arguments.
        options: some of the options of ``subprocess.Popen``.

    Raises:
        OSError: the program cannot be started.
        TypeError: the command is a string instead of a list, or an option is not supported.
        ValueError: the command is empty, or contains a NUL character.
    """
    import subprocess

    return subprocess.Popen(_arguments(command), shell=False, executable=None, preexec_fn=None, **options)


@overload
def run(
    command: Sequence[str | bytes], *, text: Literal[True], **options: Unpack[_RunOptions]
) -> subprocess.CompletedProcess[str]: ...
@overload
def run(command: Sequence[str | bytes], **options: Unpack[_RunOptions]) -> subprocess.CompletedProcess[bytes]: ...
def run(command: Sequence[str | bytes], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a program until it ends.

    Args:
        command: its path or name, and its arguments.
        options: some of the options of ``subprocess.run``.

    Raises:
        Exception: the errors of ``start``, and those of ``subprocess.run`` for ``timeout`` and ``check``.
    """
    import subprocess

    return subprocess.run(_arguments(command), shell=False, executable=None, preexec_fn=None, **options)


def spawn(
    command: Sequence[str | bytes],
    env: Mapping[str, str] | Mapping[bytes, bytes],
    files: Mapping[int, int],
    *,
    new_session: bool = False,
) -> int:
    """Start a program without ``subprocess`` and without a fork that copies this process. Return its pid.

    Args:
        command: its absolute path, and its arguments.
        files: the descriptors that it inherits: the number in the program, by which number in this process.
        new_session: whether the program leads a new session.

    Raises:
        Exception: the errors of ``start``.
    """
    arguments = _arguments(command)
    copies = {
        there: fcntl.fcntl(here, fcntl.F_DUPFD_CLOEXEC, max(files, default=2) + 1) for there, here in files.items()
    }
    try:
        return os.posix_spawn(
            arguments[0],
            arguments,
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, here, there) for there, here in copies.items()],
            setsid=new_session,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # ignored by the interpreter; a program would inherit that
        )
    finally:
        for here in copies.values():
            os.close(here)


def become(command: Sequence[str | bytes], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by a program, looked up in ``PATH`` of the given environment.

    Raises:
        Exception: the errors of ``start``.
    """
    arguments = _arguments(command)
    os.execvpe(arguments[0], arguments, env)


def _arguments(command: Sequence[str | bytes]) -> list[str | bytes]:
    if isinstance(command, str | bytes):
        raise TypeError(f"a command must be a list of arguments, not a string: {command!r}")
    arguments = list(command)
    if not arguments or not arguments[0]:
        raise ValueError("a command must start with the name of a program")
    for each in arguments:
        if not isinstance(each, str | bytes):
            raise TypeError(f"an argument must be a string: {each!r}")
        if (b"\0" in each) if isinstance(each, bytes) else ("\0" in each):
            raise ValueError(f"an argument must not contain a NUL character: {each!r}")
    return arguments
