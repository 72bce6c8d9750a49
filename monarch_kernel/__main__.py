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
    """A command. Its module is imported only when the command is called."""

    help: str
    setup: str
    """``module:function``. The function adds options to a parser and sets ``run``, a function that takes the parsed
    options and returns the exit status.
    """


_COMMANDS = {
    "install": _Command(
        "register this environment's kernel with Jupyter", "monarch_kernel.cli.install:add_install_command"
    ),
    "uninstall": _Command("undo install", "monarch_kernel.cli.install:add_uninstall_command"),
    "worker": _Command(
        "make this host available to controllers on this or other hosts",
        "monarch_kernel.cli.worker:add_worker_command",
    ),
    "debug": _Command(
        "stop, step and inspect the ranks of a kernel or script that runs on this machine",
        "monarch_kernel.cli.debug:add_debug_command",
    ),
    "look": _Command(
        "inspect running processes from outside: torchrun, Slurm, any pids",
        "monarch_kernel.cli.look:add_look_command",
    ),
    "report": _Command(
        "write the current state of all ranks of a prepared job, and why it hangs",
        "monarch_kernel.cli.report:add_report_command",
    ),
    "stragglers": _Command(
        "find the ranks that reach collectives late, from recorded files",
        "monarch_kernel.cli.stragglers:add_stragglers_command",
    ),
    "replay": _Command(
        "run one rank's captured training step again, in this process alone",
        "monarch_kernel.cli.replay:add_replay_command",
    ),
    "up": _Command("request hosts from a provider", "monarch_kernel.cli.jobs:add_up_command"),
    "apply": _Command(
        "request the hosts of a job that a Python file or module defines", "monarch_kernel.cli.apply:add_apply_command"
    ),
    "join": _Command(
        "list jobs for %%mesh join that another program started; prepare an environment or processes",
        "monarch_kernel.cli.join:add_join_command",
    ),
    "jobs": _Command("list all your jobs, on all providers", "monarch_kernel.cli.jobs:add_jobs_command"),
    "status": _Command("show the hosts of a job", "monarch_kernel.cli.jobs:add_status_command"),
    "logs": _Command("print the output of the workers of a job", "monarch_kernel.cli.jobs:add_logs_command"),
    "kill": _Command("end jobs", "monarch_kernel.cli.jobs:add_kill_command"),
    "exec": _Command("run a command on the hosts of a job", "monarch_kernel.cli.exec:add_exec_command"),
    "shell": _Command("open a shell on a host of a job", "monarch_kernel.cli.shell:add_shell_command"),
    "forward": _Command(
        "forward a TCP port of a host of a job to this machine", "monarch_kernel.cli.forward:add_forward_command"
    ),
    "completion": _Command(
        "print the completion script for bash or zsh",
        "monarch_kernel.cli.completion:add_completion_command",
    ),
    "keys": _Command(
        "make keys for controllers and workers, and maintain lists of keys that may connect",
        "monarch_kernel.cli.keys:add_keys_command",
    ),
}


def commands() -> list[str]:
    """Return the names of all commands."""
    return list(_COMMANDS)


def command_parser(name: str) -> argparse.ArgumentParser | None:
    """Return the parser of a command, or None if there is no such command."""
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
    # A random.py in the working folder must not hide the standard library's module while the kernel starts. IPython
    # adds the folder again, after the standard library.
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    gc.disable()  # until all is loaded: nothing of that is garbage
    from monarch_kernel.kernel.app import launch

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
    from monarch_kernel.display.controls import only_colours_printed

    options = _parser(first).parse_args(argv)
    # The ranks of a worker are forked from it, and their output must not be filtered.
    with nullcontext() if first == "worker" else only_colours_printed():
        return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
