"""``python -m monarch_kernel``, also installed as ``monarch-kernel``: the kernel, and commands around it.

Jupyter starts the kernel with ``-f CONNECTION_FILE``: if the first argument is an option, the kernel gets all of them;
otherwise it is the name of a command.
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
    """A command, whose module is imported only when the command is called."""

    help: str
    setup: str
    """``module:function``. The function adds options to a parser, and sets ``run``: a function of the parsed options
    that returns the exit status."""


_COMMANDS = {
    "install": _Command(
        "tell Jupyter about this environment's kernel", "monarch_kernel.cli.install:add_install_command"
    ),
    "uninstall": _Command("undo install", "monarch_kernel.cli.install:add_uninstall_command"),
    "worker": _Command(
        "let controllers of other hosts, or of this one, use this host",
        "monarch_kernel.cli.worker:add_worker_command",
    ),
    "debug": _Command(
        "stop, step and look into the ranks of a kernel or script that runs on this machine",
        "monarch_kernel.cli.debug:add_debug_command",
    ),
    "look": _Command(
        "read processes from outside that others have started: torchrun, Slurm, any pids",
        "monarch_kernel.cli.look:add_look_command",
    ),
    "report": _Command(
        "write what all ranks of a prepared job do now, and why it makes no progress",
        "monarch_kernel.cli.report:add_report_command",
    ),
    "stragglers": _Command(
        "say which ranks came late to collectives, from records in files",
        "monarch_kernel.cli.stragglers:add_stragglers_command",
    ),
    "up": _Command("ask an engine for hosts", "monarch_kernel.cli.jobs:add_up_command"),
    "apply": _Command(
        "ask for the hosts of a job that a Python file or module defines", "monarch_kernel.cli.apply:add_apply_command"
    ),
    "join": _Command(
        "list jobs that others have started, for %%mesh join; prepare an environment for that",
        "monarch_kernel.cli.join:add_join_command",
    ),
    "jobs": _Command("list all jobs of yours, on all engines", "monarch_kernel.cli.jobs:add_jobs_command"),
    "status": _Command("show the hosts of a job", "monarch_kernel.cli.jobs:add_status_command"),
    "logs": _Command("print what the workers of a job have written", "monarch_kernel.cli.jobs:add_logs_command"),
    "kill": _Command("end jobs", "monarch_kernel.cli.jobs:add_kill_command"),
    "exec": _Command("run a command on the hosts of a job", "monarch_kernel.cli.exec:add_exec_command"),
    "shell": _Command("open a shell on a host of a job", "monarch_kernel.cli.shell:add_shell_command"),
    "forward": _Command(
        "bring a TCP port of a host of a job to this machine", "monarch_kernel.cli.forward:add_forward_command"
    ),
    "completion": _Command(
        "print what bash or zsh needs to complete these commands",
        "monarch_kernel.cli.completion:add_completion_command",
    ),
    "keys": _Command(
        "make keys for controllers and workers, and lists of keys that may connect",
        "monarch_kernel.cli.keys:add_keys_command",
    ),
}


def commands() -> list[str]:
    """The names of all commands."""
    return list(_COMMANDS)


def command_parser(name: str) -> argparse.ArgumentParser | None:
    """The parser of a command; None: there is no such command."""
    if name not in _COMMANDS:
        return None
    import argparse

    parser = argparse.ArgumentParser(prog=f"monarch-kernel {name}")
    module, _, function = _COMMANDS[name].setup.partition(":")
    getattr(import_module(module), function)(parser)
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
    for name, (text, setup) in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == command:
            module, _, function = setup.partition(":")
            getattr(import_module(module), function)(sub)
    return parser


def _run_kernel(argv: Sequence[str]) -> int:
    # A user's random.py in the working folder must not hide the standard library's while the kernel starts. IPython
    # adds the folder again, behind the standard library.
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    gc.disable()  # until all is loaded: nothing of that is garbage
    from monarch_kernel.kernel.app import launch

    launch(argv)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or the kernel.

    Args:
        argv: the arguments; by default those of the process.

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
    from monarch_kernel.display.controls import only_colours_printed

    options = _parser(first).parse_args(argv)
    # A worker's ranks begin as copies of it, and print what they like.
    with nullcontext() if first == "worker" else only_colours_printed():
        return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
