"""Run programs written for torchrun on the hosts of a job. The hosts stay, so the next run does not queue."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from monarch_kernel.actor import HostMesh, MeshFailure, attach_to_workers
from monarch_kernel.launchers.base import Resources, launcher_class, launcher_names
from monarch_kernel.launchers.engine_job import EngineJob
from monarch_kernel.launchers.job import Job, JobState, LocalJob, Path, job_loads
from monarch_kernel.spmd import SPMDActor
from monarch_kernel.workers import make_job_folder, remove_job_folder, start_worker_loop_forever

# ``StoreJob``: the hosts of a program that torchrun has started, found through the store of its ranks.

#: The time limit for a worker to listen, and to answer (seconds).
_START_TIME = 60.0


class StoreLike(Protocol):
    """The used methods of a store, such as ``torch.distributed.TCPStore``: ``get`` waits until the key is set."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


class StoreJob(Job):
    """The hosts of a running program: one worker for each local rank 0, which ends with the process of that rank.

    Args:
        worker_addrs: the URLs of the workers, in the order of the hosts.
        name: the name of the mesh.
    """

    def __init__(self, worker_addrs: list[str], name: str) -> None:
        super().__init__()
        self._workers = list(worker_addrs)
        self._name = name
        self._mesh: HostMesh | None = None

    @classmethod
    def from_store(
        cls,
        store: StoreLike,
        *,
        monarch_port: int = 0,
        name: str = "monarch_worker",
        transport: str = "ipc",
        rank: int | None = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        local_world_size: int | None = None,
    ) -> StoreJob | None:
        """Create a worker on each host. Every rank calls this; global rank 0 gets the job, and the others get None.

        Args:
            store: the store that the ranks share. Only addresses are written there, no keys.
            monarch_port: the port at which workers listen, with ``tcp``; 0: any free port.
            name: the name of the mesh.
            transport: ``ipc`` (all ranks are on this machine) or ``tcp``, for which every host has the team's key
                (``MONARCH_KERNEL_KEY_FILE``).
            rank, local_rank, world_size, local_world_size: by default the values in torchrun's environment.

        Raises:
            RuntimeError: a worker could not start; the error names each one on global rank 0, and the local one on
                others.
            ValueError: the transport is unknown, or the rank is neither given nor in the environment.
        """
        here = _number(rank, "RANK")
        local = _number(local_rank, "LOCAL_RANK")
        step = _number(local_world_size, "LOCAL_WORLD_SIZE")
        hosts = _number(world_size, "WORLD_SIZE") // step
        if transport not in ("ipc", "tcp"):
            raise ValueError(f"transport={transport!r}: there are ipc and tcp")
        failed: Exception | None = None
        if local == 0:
            told: dict[str, str] = {}
            try:
                told["url"] = _start_worker(transport, monarch_port)
            except Exception as e:  # rank 0 waits for this, and reports it
                failed, told["error"] = e, f"{socket.gethostname()}: {e}"
            store.set(f"{name}/{here // step}", json.dumps(told))
        if here == 0:
            found = [json.loads(store.get(f"{name}/{host}")) for host in range(hosts)]
            if errors := [each["error"] for each in found if "error" in each]:
                raise RuntimeError(f"{len(errors)} of {hosts} workers could not start: {'; '.join(errors)}")
            return cls([each["url"] for each in found], name)
        if failed is not None:
            raise RuntimeError(f"the worker of this host could not start: {failed}") from failed
        return None

    def state(self, cached_path: Path | None = None) -> JobState:
        """Return the hosts, attached. Nothing is stored, as they end with their program."""
        return super().state(cached_path)

    def can_run(self, spec: Job) -> bool:
        """Return whether this job satisfies another one: always false, as it belongs to no other program."""
        return False

    def _start(self) -> None:
        pass

    def _hosts(self) -> dict[str, HostMesh]:
        if self._mesh is None:
            self._mesh = attach_to_workers(workers=self._workers, name=self._name, timeout=_START_TIME)
        return {self._name: self._mesh}

    def _end(self) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.stop("the job was killed").get()  # the workers belong to their ranks

    def _is_alive(self) -> bool:
        return True

    def _spec(self) -> tuple[list[str], str]:
        return self._workers, self._name

    def _fields(self) -> dict[str, object]:
        return {"worker_addrs": self._workers, "name": self._name}

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> StoreJob:
        return cls(**fields)


def _number(given: int | None, variable: str) -> int:
    text = os.environ.get(variable, "") if given is None else str(given)
    if not text.isdecimal():
        raise ValueError(f"{variable} is not set: run the program by torchrun, or give {variable.lower()}=")
    return int(text)


def _start_worker(transport: str, port: int) -> str:
    """Start a worker that ends with this process. Return its URL."""
    if transport == "tcp":
        return start_worker_loop_forever(address=f"tcp://{socket.getfqdn()}:{port}").url.get(_START_TIME)
    folder = make_job_folder()

    def remove() -> None:
        folder.close()
        with contextlib.suppress(OSError):
            remove_job_folder(folder.path)

    atexit.register(remove)
    return start_worker_loop_forever(address=f"ipc://{folder.path}/worker.sock").url.get(_START_TIME)


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


def app_command(app: object) -> TorchrunCommand:
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

    def _fields(self) -> dict[str, object]:
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
    appdef: Sequence[str] | object,
    scheduler: str = "local",
    scheduler_cfg: Mapping[str, object] | None = None,
    **options: object,
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
