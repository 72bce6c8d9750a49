"""Build commands that run a Python module on other machines: by ssh, or inside an allocation of Slurm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from monarch_kernel import programs
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.scripts import script
from monarch_kernel.launchers.slurm.queue import step_beside
from monarch_kernel.launchers.ssh import hostfile, ssh_command


def relay_commands(
    module: str, hosts: str, hosts_file: str, slurm: str, python: str = "", ssh: Sequence[str] = ("ssh",)
) -> dict[str, list[str]]:
    """Return the command for each machine that the options of a command line name.

    Args:
        module: the Python module to run there.
        hosts: hosts separated by commas, reached by ssh.
        hosts_file: a file with further hosts; "": none.
        slurm: a Slurm job on whose nodes the module also runs; "": none.
        python, ssh: see ``by_ssh``.

    Raises:
        LaunchError: Slurm knows no such running job.
        ValueError: the file cannot be read, or a word is not a host.
    """
    named = [each for each in hosts.split(",") if each]
    commands = by_ssh(module, [*named, *(hostfile(hosts_file) if hosts_file else ())], python, ssh)
    return {**commands, **(by_srun(module, slurm, python) if slurm else {})}


def by_ssh(module: str, hosts: Sequence[str], python: str = "", ssh: Sequence[str] = ("ssh",)) -> dict[str, list[str]]:
    """Return the command for each host, with the system's ssh: the user's configuration, keys, agents and jump hosts.

    Args:
        module: the Python module to run there.
        hosts: hosts in the form for ssh.
        ssh: the command, with further options.
        python: the interpreter there; by default the path of this process's interpreter.

    Raises:
        ValueError: a word is not a host.
    """
    remote = script("exec @{python} -m @{module}", python=python or sys.executable, module=module)
    return {host: ssh_command(ssh, host, remote) for host in hosts}


def by_srun(module: str, job: str, python: str = "") -> dict[str, list[str]]:
    """Return the command for each node of a Slurm job: a step beside the running ones.

    Args:
        module: the Python module to run there.
        job: the number of the job, or of one of its steps.
        python: the interpreter there; by default the path of this process's interpreter.

    Raises:
        LaunchError: Slurm knows no such running job; the message quotes Slurm.
    """
    job = job.partition(".")[0]
    try:
        listed = programs.run(
            ["squeue", "--noheader", "--jobs", job, "--states", "RUNNING", "--format", "%N"],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        if listed.returncode or not listed.stdout.strip():
            raise LaunchError(f"Slurm has no running job {job}: {listed.stderr.strip() or 'squeue lists none'}")
        names = programs.run(
            ["scontrol", "show", "hostnames", listed.stdout.strip()],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"Slurm cannot be asked for the nodes of job {job}: {error}") from None
    relay = [python or sys.executable, "-m", module]
    return {node: [*step_beside(job, node), *relay] for node in names.stdout.split()}
