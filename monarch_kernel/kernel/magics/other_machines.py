"""Where lines of `%mesh` look for joinable jobs, besides this machine."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from IPython.core.magic_arguments import argument

from monarch_kernel import environment
from monarch_kernel.engines.join.remote_machine import RELAY
from monarch_kernel.errors import LaunchError
from monarch_kernel.kernel.joined_meshes import Machines
from monarch_kernel.kernel.magics.arguments import Arguments
from monarch_kernel.kernel.usage_errors import usage_error
from monarch_kernel.launchers.relay_commands import relay_commands

_OPTIONS = (
    argument("--hosts", default="", metavar="HOST,...", help="also look for ranks on these, by ssh"),
    argument("--ssh", default="ssh", metavar="COMMAND", help="ssh, and further options of it: 'ssh -F config'"),
    argument("--hostfile", default="", metavar="FILE", help="the same for the hosts in a file"),
    argument("--slurm", default="", metavar="JOBID", help="the same for the nodes of a job of Slurm, by srun"),
    argument("--python", default="", metavar="PATH", help="the interpreter there (the path of this kernel's own)"),
    argument(
        "--meet", metavar="HOST:PORT", help=f"and on the machines at this meeting point ({environment.JOIN_MEET.name})"
    ),
)


def other_machines(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a subcommand the options that name other machines."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def machines_of(found: Arguments) -> Machines:
    """The machines that a line names.

    Raises:
        UsageError: a host file cannot be read, Slurm does not know the job, or an address is none.
    """
    meet = environment.JOIN_MEET
    try:
        ssh = shlex.split(found.ssh)
        commands = relay_commands(RELAY, found.hosts, found.hostfile, found.slurm, found.python, ssh)
        return Machines(commands, meet.get() if found.meet is None else meet.parse(found.meet))
    except (ValueError, OSError, LaunchError) as error:
        raise usage_error(found.magic, str(error)) from None
