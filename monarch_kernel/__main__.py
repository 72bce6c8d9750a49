"""Entry point of ``monarch-kernel`` and ``python -m monarch_kernel``: the kernel and its command-line tools.

Jupyter starts the kernel with ``-f CONNECTION_FILE``. If the first argument is an option, all arguments are passed to
the kernel. Otherwise the first argument is the name of a command.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from monarch_kernel._version import __version__

if TYPE_CHECKING:
    import argparse


class _Command(NamedTuple):
    """A command."""

    module: str
    """The module of ``monarch_kernel.cli`` with its function ``add_NAME_command``, imported only when it is called. The
    function adds options to a parser and sets ``run``, a function that takes the parsed options and returns the exit
    status.
    """
    help: str


_COMMANDS = {
    "install": _Command("install", "register this environment's kernel with Jupyter"),
    "uninstall": _Command("install", "undo install"),
    "doctor": _Command("doctor", "check what is installed and usable here, and how to add the rest"),
    "worker": _Command("worker", "make this host available to controllers on this or other hosts"),
    "debug": _Command("debug", "stop, step and inspect the ranks of a kernel or script that runs on this machine"),
    "look": _Command("debug", "inspect running processes from outside: torchrun, Slurm, any pids"),
    "report": _Command("debug", "write the current state of all ranks of a prepared job, and why it hangs"),
    "stragglers": _Command("debug", "find the ranks that reach collectives late, from recorded files"),
    "replay": _Command("replay", "run one rank's captured training step again, in this process alone"),
    "up": _Command("jobs", "request hosts from a provider"),
    "apply": _Command("jobs", "request the hosts of a job that a Python file or module defines"),
    "join": _Command(
        "join", "list jobs for %%mesh join that another program started; prepare an environment or processes"
    ),
    "jobs": _Command("jobs", "list all your jobs, on all providers"),
    "status": _Command("jobs", "show the hosts of a job"),
    "logs": _Command("jobs", "print the output of the workers of a job"),
    "kill": _Command("jobs", "end jobs"),
    "exec": _Command("exec", "run a command on the hosts of a job"),
    "shell": _Command("exec", "open a shell on a host of a job"),
    "forward": _Command("exec", "forward a TCP port of a host of a job to this machine"),
    "completion": _Command("install", "print the completion script for bash or zsh"),
    "keys": _Command("keys", "make keys for controllers and workers, and maintain lists of keys that may connect"),
}


def _add_options(name: str, parser: argparse.ArgumentParser) -> None:
    """Add the options of a command to its parser."""
    getattr(import_module(f"monarch_kernel.cli.{_COMMANDS[name].module}"), f"add_{name}_command")(parser)


def commands() -> list[str]:
    """Return the names of all commands."""
    return list(_COMMANDS)


def command_parser(name: str) -> argparse.ArgumentParser | None:
    """Return the parser of a command, or None if there is no such command."""
    if name not in _COMMANDS:
        return None
    import argparse

    parser = argparse.ArgumentParser(prog=f"monarch-kernel {name}")
    _add_options(name, parser)
    return parser


def _parser(command: str | None) -> argparse.ArgumentParser:
    import argparse

    parser = argparse.ArgumentParser(
        prog="monarch-kernel",
        description="The Monarch kernel for Jupyter.",
        epilog="With -f CONNECTION_FILE, as Jupyter calls it, the kernel itself runs.",
    )
    parser.add_argument("--version", action="version", version=f"monarch_kernel {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, text) in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == command:
            _add_options(name, sub)
    return parser


def _run_kernel(argv: Sequence[str]) -> int:
    # A random.py in the working folder must not hide the standard library's module while the kernel starts. IPython
    # adds the folder again, after the standard library.
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    gc.disable()  # until all is loaded: nothing of that is garbage
    try:
        from monarch_kernel.kernel.kernel import launch
    except ModuleNotFoundError as error:
        if (error.name or "monarch_kernel").partition(".")[0] == "monarch_kernel":
            raise
        # Where monarch_kernel was installed without its dependencies, Jupyter offers the kernel nonetheless.
        print(
            f"The Monarch kernel cannot run in {sys.prefix}, which lacks the package {error.name}: "
            "'monarch-kernel doctor kernel' there says how to add what it needs",
            file=sys.stderr,
        )
        return 1
    launch(argv)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command or the kernel.

    Args:
        argv: the arguments; by default the arguments of the process.

    Returns:
        The exit status.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    first = argv[0] if argv else ""
    if first.startswith("-") and first not in ("-h", "--help", "--version"):
        return _run_kernel(argv)
    if first == "worker":
        from monarch_kernel.cli.worker import run_plain

        if (status := run_plain(argv[1:])) is not None:
            return status
    from monarch_kernel.display.tables import only_colours_printed

    options = _parser(first).parse_args(argv)
    # The ranks of a worker are forked from it, and their output must not be filtered.
    with nullcontext() if first == "worker" else only_colours_printed():
        return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
