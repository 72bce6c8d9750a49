"""A command on the hosts of a job: its output from each, folded where it is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from monarch_kernel.actor import Actor, HostMesh, current_rank, endpoint
from monarch_kernel.meshes import format_ranks

#: What a shell says of a command that it cannot find or run.
_NOT_FOUND, _NOT_RUN = 127, 126


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended in one place.

    Attributes:
        rank: the number of its process in the mesh; with one on each host, that of the host.
        point: where that is, by dimension.
        name: the host's own name.
        code: its exit code; 128 and the signal, if one ended it.
        output: what it wrote, standard output and standard error in one.
    """

    rank: int
    point: dict[str, int]
    name: str
    code: int
    output: str

    def plain(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"host": self.point["hosts"], **asdict(self)}


@dataclass(frozen=True)
class HostCommand:
    """What to run.

    Attributes:
        words: the program and its arguments; no shell reads them.
        env: further environment variables.
        workdir: the folder there; None: that of this process, if the host has it.
        script: bash runs this, and the words are its arguments; None: the words are the command.
        module: whether Python there runs a module, whose name the first word is.
    """

    words: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str | None = None
    script: bytes | None = None
    module: bool = False


class _Runner(Actor):
    """Runs the command in the place of one process."""

    def __init__(self, host: int, hosts: int) -> None:
        here = current_rank()
        self._rank = host * here.extent.nelements + here.rank
        self._point = {**here, "hosts": host}
        self._sizes = {**{name: here.size(name) for name in here}, "hosts": hosts}

    @endpoint
    def run(self, command: HostCommand) -> CommandEnd:
        words = [sys.executable, "-m", *command.words] if command.module else list(command.words)
        env = {**os.environ, **command.env}
        for name, at in self._point.items():
            env[f"MONARCH_RANK_{name}"] = str(at)
            env[f"MONARCH_SIZE_{name}"] = str(self._sizes[name])
        fds: list[int] = []
        try:
            if command.script is not None:  # not in argv, which other users can read
                fds = [os.memfd_create("script", 0)]
                with open(fds[0], "wb", closefd=False) as file:
                    file.write(command.script)
                words = ["bash", f"/proc/self/fd/{fds[0]}", *words]
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=command.workdir,
                pass_fds=fds,
                check=False,
            )
        except OSError as e:
            code = _NOT_FOUND if isinstance(e, FileNotFoundError) else _NOT_RUN
            return self._end(code, f"{e.filename or words[0]}: {e.strerror}\n")
        finally:
            for fd in fds:
                os.close(fd)
        return self._end(
            done.returncode if done.returncode >= 0 else 128 - done.returncode, done.stdout.decode(errors="replace")
        )

    def _end(self, code: int, output: str) -> CommandEnd:
        return CommandEnd(self._rank, self._point, os.uname().nodename, code, output)


def run_command(
    hosts: HostMesh, numbers: Sequence[int], command: HostCommand, per_host: Mapping[str, int], at: Mapping[str, int]
) -> list[CommandEnd]:
    """Run a command on some hosts of a mesh at once, and wait for all of them.

    Each gets its place in ``MONARCH_RANK_<dimension>`` and ``MONARCH_SIZE_<dimension>``. An interrupt of this process
    ends it everywhere, as the processes in which it runs end then.

    Args:
        hosts: a mesh with the dimension ``hosts``.
        numbers: those on which it runs.
        command: what to run.
        per_host: the dimensions and sizes of the processes on each host that run it; {}: one.
        at: run it only in those of them that have these coordinates.
    """
    chosen = sorted(set(numbers))
    where = {name: slice(position, position + 1) for name, position in at.items()}
    procs = [
        hosts.slice(hosts=slice(number, number + 1)).spawn_procs(per_host=per_host or None, name="exec")
        for number in chosen
    ]
    try:
        runners = [each.spawn("command", _Runner, number, len(hosts)) for each, number in zip(procs, chosen)]
        calls = [runner.slice(**where).run.call(command) for runner in runners]
        return [end for call in calls for end in call.get().values()]
    finally:
        for each in procs:
            each.stop("the command has ended").get()


def folded(ends: Sequence[CommandEnd]) -> str:
    """The output of all, equal output once, each under the ranks that wrote it; of a single one as it is."""
    if len(ends) == 1:
        return ends[0].output
    groups: dict[tuple[str, int], list[int]] = {}
    for end in ends:
        groups.setdefault((end.output, end.code), []).append(end.rank)
    parts: list[str] = []
    for (output, code), members in groups.items():
        body = output if not output or output.endswith("\n") else f"{output}\n"
        parts.append(f"== {format_ranks(members)}" + (f", exit code {code}" if code else "") + f" ==\n{body}")
    return "".join(parts)
