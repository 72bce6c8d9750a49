"""A command on the hosts of a job: its output from each, folded where it is the same."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from monarch_kernel.actor import Actor, HostMesh, current_rank, endpoint
from monarch_kernel.meshes import format_ranks

#: What a shell says of a command that it cannot find or run.
_NOT_FOUND, _NOT_RUN = 127, 126


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended on a host.

    Attributes:
        host: the number of the host in its mesh.
        name: the host's own name.
        code: its exit code; 128 and the signal, if one ended it.
        output: what it wrote, standard output and standard error in one.
    """

    host: int
    name: str
    code: int
    output: str

    def plain(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


class _Runner(Actor):
    """Runs the command on one host."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._host = numbers[current_rank().rank]

    @endpoint
    def run(self, command: Sequence[str], env: Mapping[str, str], workdir: str | None) -> CommandEnd:
        name = os.uname().nodename
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                cwd=workdir,
                check=False,
            )
        except OSError as e:
            code = _NOT_FOUND if isinstance(e, FileNotFoundError) else _NOT_RUN
            return CommandEnd(self._host, name, code, f"{e.filename or command[0]}: {e.strerror}\n")
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        return CommandEnd(self._host, name, code, done.stdout.decode(errors="replace"))


def run_command(
    hosts: HostMesh, numbers: Sequence[int], command: Sequence[str], env: Mapping[str, str], workdir: str | None
) -> list[CommandEnd]:
    """Run a command on some hosts of a mesh at once, and wait for all of them.

    An interrupt of this process ends it everywhere, as the processes in which it runs end then.

    Args:
        hosts: a mesh with the dimension ``hosts``.
        numbers: those on which it runs.
        command: the program and its arguments; no shell reads them.
        env: further environment variables.
        workdir: the folder there; None: that of this process, if the host has it.
    """
    chosen = sorted(set(numbers))
    procs = [hosts.slice(hosts=slice(number, number + 1)).spawn_procs(name="exec") for number in chosen]
    try:
        runners = [each.spawn("command", _Runner, [number]) for each, number in zip(procs, chosen)]
        calls = [runner.run.call_one(list(command), dict(env), workdir) for runner in runners]
        return [call.get() for call in calls]
    finally:
        for each in procs:
            each.stop("the command has ended").get()


def folded(ends: Sequence[CommandEnd]) -> str:
    """The output of all, equal output once, each under the hosts that wrote it; of a single host as it is."""
    if len(ends) == 1:
        return ends[0].output
    groups: dict[tuple[str, int], list[int]] = {}
    for end in ends:
        groups.setdefault((end.output, end.code), []).append(end.host)
    parts: list[str] = []
    for (output, code), members in groups.items():
        body = output if not output or output.endswith("\n") else f"{output}\n"
        parts.append(f"== {format_ranks(members)}" + (f", exit code {code}" if code else "") + f" ==\n{body}")
    return "".join(parts)
