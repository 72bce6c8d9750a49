"""``monarch-kernel shell``: open a shell on a host of a job in this terminal. The exit code is that of the shell."""

from __future__ import annotations

import argparse

from monarch_kernel.cli.lines import (
    add_environment,
    add_job,
    add_mesh,
    check_host,
    guarded,
    hosts_of_line,
    variables,
)


def add_shell_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel shell``."""
    parser.description = (
        "Opens a shell on a host of a job. It ends with this command, and its child processes end with it. Use setsid "
        "to start a process that outlives it."
    )
    add_job(parser)
    parser.add_argument(
        "host", nargs="?", type=int, default=0, metavar="HOST", help="the number of the host in the mesh (0)"
    )
    add_mesh(parser)
    add_environment(parser)
    parser.set_defaults(run=guarded(run_shell_line))


def run_shell_line(options: argparse.Namespace) -> int:
    """Open the shell and return its exit code."""
    from monarch_kernel.launchers.remote_shell import run_shell

    env = variables(options.env)
    with hosts_of_line(options) as hosts:
        return run_shell(hosts, check_host(options.host, hosts), env, options.workdir)
