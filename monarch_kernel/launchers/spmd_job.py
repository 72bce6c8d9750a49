"""Run programs written for torchrun on the hosts of a job. The hosts stay, so the next run does not queue."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from monarch_kernel.actor import HostMesh, MeshFailure
from monarch_kernel.launchers.base import Resources, launcher_class, launcher_names
from monarch_kernel.launchers.engine_job import EngineJob
from monarch_kernel.launchers.job import Job, job_loads
from monarch_kernel.launchers.local import LocalJob
from monarch_kernel.spmd import SPMDActor

#: The name of a job's hosts, and of the dimension of the ranks on each.
HOSTS = "hosts"
PER_HOST = "gpus"
#: The names of this machine as a scheduler. The second is TorchX's.
_LOCAL = ("local", "local_cwd")
#: torchrun's options with a value that decide what runs where, and others with a value, which are ignored here.
_HOSTS, _PER_HOST = ("--nnodes",), ("--nproc-per-node", "--nproc_per_node")
_IGNORED = (
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts", "--monitor-interval"),
    *("--start-method", "--node-rank", "--master-addr", "--master-port", "--role", "--local-addr", "--log-dir"),
    *("--redirects", "--tee", "-r", "-t"),
)


@dataclass(frozen=True)
class TorchrunCommand:
    """A parsed command line of torchrun.

    Attributes:
        program: ``["-m", module, ...]`` or ``[path, ...]``, with its arguments.
        per_host: the number of ranks on each host.
        hosts: the number of hosts.
        env: further environment variables.
    """

    program: tuple[str, ...]
    per_host: int = 1
    hosts: int = 1
    env: Mapping[str, str] = field(default_factory=dict[str, str])


def torchrun_command(words: Sequence[str]) -> TorchrunCommand:
    """Parse a command line: ``["torchrun", "--nproc-per-node", "8", "train.py", "--lr", "0.1"]``.

    Raises:
        ValueError: it is not a command line of torchrun, names no program, or its number of ranks is invalid.
    """
    left = [str(word) for word in words]
    if left[1:3] == ["-m", "torch.distributed.run"]:
        left = ["torchrun", *left[3:]]
    if not left or os.path.basename(left[0]) != "torchrun":
        raise ValueError(f"serve() takes a command line that begins with torchrun, not {shlex.join(left[:1])!r}")
    counts = {_HOSTS: 1, _PER_HOST: 1}
    del left[0]
    while left and left[0].startswith("-") and left[0] != "-m":
        option, equals, value = left.pop(0).partition("=")
        option = option.replace("_", "-") if option.startswith("--") else option
        known = next((names for names in (_HOSTS, _PER_HOST) if option in names), None)
        if known is None and option not in _IGNORED:
            continue  # an option without a value, such as --standalone
        if not equals:
            if not left:
                raise ValueError(f"{option} has no value")
            value = left.pop(0)
        if known is not None:
            if not value.isdecimal() or int(value) < 1:
                raise ValueError(f"{option} takes a number of at least 1 here, not {value!r}")
            counts[known] = int(value)
    if not left or left == ["-m"]:
        raise ValueError("the command line of torchrun names no program")
    return TorchrunCommand(tuple(left), counts[_PER_HOST], counts[_HOSTS])


def app_command(app: Any) -> TorchrunCommand:
    """Parse the first role of an ``AppDef`` of TorchX. Its entrypoint must be torchrun.

    Raises:
        ValueError: there is no role, or it runs another program.
    """
    roles: list[Any] = list(getattr(app, "roles", None) or [])
    if not roles:
        raise ValueError(f"serve() takes a command line of torchrun or an AppDef of TorchX with a role, not {app!r}")
    role = roles[0]
    found = torchrun_command([role.entrypoint, *role.args])
    hosts = max(found.hosts, int(getattr(role, "num_replicas", 1) or 1))
    return TorchrunCommand(found.program, found.per_host, hosts, dict(getattr(role, "env", None) or {}))


class SPMDJob(Job):
    """A program written for torchrun, and the job whose hosts it runs on.

    Args:
        job: the hosts, which `apply` or the first run requests, and which stay until `kill`.
        command: the command to run there.
        mesh: the name of the hosts in the job.
    """

    def __init__(self, job: Job, command: TorchrunCommand, mesh: str = HOSTS) -> None:
        super().__init__()
        self.job = job
        self.command = command
        self._mesh = mesh

    def _start(self) -> None:
        self.job.apply()

    def _hosts(self) -> dict[str, HostMesh]:
        return self.job._hosts()

    def _end(self) -> None:
        self.job.kill()

    def _is_alive(self) -> bool:
        return self.job.active

    def _spec(self) -> Any:
        return type(self.job), self.job._spec(), self.command, self._mesh

    def _fields(self) -> dict[str, Any]:
        command = msgspec.to_builtins(self.command)
        return {"job": self.job.dumps().decode(), "command": command, "mesh": self._mesh}

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> SPMDJob:
        command = msgspec.convert(fields["command"], TorchrunCommand)
        return cls(job_loads(fields["job"].encode()), command, fields["mesh"])

    def run_spmd(self) -> None:
        """Run the program to its end, with torchrun's environment variables on each rank.

        Each run starts new processes on the hosts of the last run.

        Raises:
            ActorError: the program failed on some ranks; the message has their tracebacks.
            MeshFailure: ranks have died.
            LaunchError: there are no hosts.
        """
        hosts: HostMesh = getattr(self.state(), self._mesh)
        procs = hosts.spawn_procs(per_host={PER_HOST: self.command.per_host}, env=dict(self.command.env), name="spmd")
        try:
            spmd = procs.spawn("spmd", SPMDActor)
            first = spmd.flatten("ranks").slice(ranks=slice(0, 1))
            address, port = first.get_host_port.call_one().get()
            spmd.main.call(address, port, list(self.command.program)).get()
        finally:
            try:
                procs.stop("the program has ended").get()
            except MeshFailure:  # already reported
                pass


def serve(
    appdef: Sequence[str] | Any,
    scheduler: str = "local",
    scheduler_cfg: Mapping[str, Any] | None = None,
    **options: Any,
) -> SPMDJob:
    """Create a job for a program written for torchrun. Its hosts are requested once, and each run uses them again.

    Args:
        appdef: ``["torchrun", "--nproc-per-node", "8", "train.py"]``, also with ``--nnodes``, or an ``AppDef`` of
            TorchX whose first role runs torchrun.
        scheduler: ``local`` or ``local_cwd`` (this machine), or a launcher: ``slurm``, ``ssh``, ``kubernetes``, ...
        scheduler_cfg: the same as options, in a dictionary.
        options: options of the launcher, as ``%mesh up --on SCHEDULER --help`` lists them.

    Raises:
        ValueError: the command line is invalid, there is no such launcher, or it has no such option.
    """
    found = torchrun_command(appdef) if isinstance(appdef, list | tuple) else app_command(appdef)
    options = {**(scheduler_cfg or {}), **options}
    if scheduler in _LOCAL:
        if found.hosts > 1 or options:
            raise ValueError(
                f"the scheduler {scheduler!r} is this machine, one host without options: name another scheduler"
            )
        return SPMDJob(LocalJob(), found)
    known = [*launcher_names()]
    if scheduler not in known:
        raise ValueError(f"there is no scheduler {scheduler!r}; there are local, local_cwd, {', '.join(known)}")
    launcher = launcher_class(scheduler)
    wishes = {option.name for option in launcher.OPTIONS if option.wish}
    wished = {name: value for name, value in options.items() if name in wishes}
    made = launcher.configured({name: value for name, value in options.items() if name not in wishes})
    return SPMDJob(EngineJob(made, {HOSTS: found.hosts}, resources=Resources(options=wished)), found)
