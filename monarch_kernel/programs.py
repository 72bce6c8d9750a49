"""The one place where programs are started: with a list of arguments, and without a shell.

Any of our packages may import this module, and it imports none of them. ``subprocess``, which takes milliseconds to
load, is loaded by the functions that need it.
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
        """What ``start`` takes: options of ``subprocess.Popen`` that name no other program and no code to run."""

        stdin: int | IO[Any] | None
        stdout: int | IO[Any] | None
        stderr: int | IO[Any] | None
        cwd: str | None
        env: Mapping[str, str] | None
        pass_fds: Collection[int]
        start_new_session: bool

    class _RunOptions(_Options, total=False):
        """What ``run`` takes: those, and options of ``subprocess.run``."""

        input: str | bytes | None
        capture_output: bool
        errors: str
        timeout: float
        check: bool


PACKAGE = os.path.dirname(os.path.abspath(__file__))
"""The folder of this package."""

ROOT = os.path.dirname(PACKAGE)
"""The folder that it is imported from: programs of ours are started with it on their import path."""


def own_command() -> list[str]:
    """The command line of this package, as this process has imported it: it need not be installed."""
    start = f"import sys; sys.path.insert(0, {ROOT!r}); from monarch_kernel.__main__ import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", start]


def start(command: Sequence[str | bytes], **options: Unpack[_Options]) -> subprocess.Popen[bytes]:
    """Start a program.

    Args:
        command: its path or name, and its arguments.
        options: as those of ``subprocess.Popen``.

    Raises:
        OSError: it cannot be started.
        TypeError: the command is a text instead of a list, or an option is none of these.
        ValueError: the command is empty, or holds a NUL character.
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
        options: as those of ``subprocess.run``.

    Raises:
        Exception: as ``start``, and what ``subprocess.run`` raises for ``timeout`` and ``check``.
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
    """Start a program without ``subprocess``, and without a fork that copies this process; returns its pid.

    Args:
        command: its absolute path, and its arguments.
        files: descriptors that it inherits: their numbers in the program, and here.
        new_session: it leads a session of its own.

    Raises:
        Exception: as ``start``.
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
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # the interpreter ignores them, which a program would inherit
        )
    finally:
        for here in copies.values():
            os.close(here)


def become(command: Sequence[str | bytes], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by a program, which is found by ``PATH`` of its environment.

    Raises:
        Exception: as ``start``.
    """
    arguments = _arguments(command)
    os.execvpe(arguments[0], arguments, env)


def _arguments(command: Sequence[str | bytes]) -> list[str | bytes]:
    if isinstance(command, str | bytes):
        raise TypeError(f"a command is a list of arguments, not a line: {command!r}")
    arguments = list(command)
    if not arguments or not arguments[0]:
        raise ValueError("a command names a program")
    for each in arguments:
        if not isinstance(each, str | bytes):
            raise TypeError(f"an argument is a text: {each!r}")
        if (b"\0" in each) if isinstance(each, bytes) else ("\0" in each):
            raise ValueError(f"an argument has no NUL character: {each!r}")
    return arguments
