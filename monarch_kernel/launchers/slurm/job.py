"""``SlurmJob``: hosts from Slurm, with Monarch's names of its arguments."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from monarch_kernel import environment
from monarch_kernel.launchers.base import LaunchError, LaunchRequest, Resources, Ticket
from monarch_kernel.launchers.engine_job import TIMEOUT, EngineJob
from monarch_kernel.launchers.job import CACHED_PATH, JobState, Path, checked_meshes
from monarch_kernel.launchers.slurm import queue as slurm_queue
from monarch_kernel.launchers.slurm.launcher import SlurmLauncher

_UNITS = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class SlurmJob(EngineJob):
    """Hosts from Slurm: its nodes, with a worker on each (``docs/slurm.md``).

    Args:
        meshes: the number of hosts of each mesh, by its name. They are one allocation.
        python_exe: the interpreter on the nodes; "": the path of this process's interpreter.
        slurm_args: further arguments for salloc or sbatch, as written on its command line.
        monarch_port: the port at which workers listen; 0: any free port.
        job_name: the name in the queue.
        ntasks_per_node: the number of Slurm tasks; with ``cpus_per_task``, the processors of a node.
        time_limit: the walltime, as Slurm writes it ("4:00:00", "2-00", minutes), or in seconds as a float.
        partition: the partition; by default the cluster's.
        log_dir: a folder for the scripts, the key and the logs, accessible to you only. By default in your home folder.
        exclusive: whether to request whole nodes.
        share_node: the opposite.
        gpus_per_node: devices.
        cpus_per_task: processors.
        mem: memory of a node, such as "64G".
        job_start_timeout: the time that ``state`` waits for hosts (seconds).
        account: the account that is charged.
        qos: the quality of service.
        constraint: features of nodes.
        reservation: take nodes of this reservation.
        gres: generic resources, such as "gpu:a100:4".
        nodelist: nodes that must be used.
        exclude: nodes that must not be used.
        way: "salloc", "sbatch" or "array"; see ``SlurmLauncher``.
        spares: the number of additional nodes, on which lost hosts are replaced at once.
        interface: the network interface at which workers listen, such as "ib0".
        shared_home: whether nodes can access the folder of the job; otherwise munge transfers the key.
        out_of_cluster: whether workers are reached through ``ssh`` to their nodes, because their ports are closed.
        attach_to: the id of a running job in which workers are started; it does not end with this job.
        options: those of ``EngineJob``.
    """

    _in_batch = False
    _script: list[str] | None = None

    def __init__(
        self,
        meshes: Mapping[str, int],
        python_exe: str = "",
        slurm_args: Sequence[str] = (),
        monarch_port: int = 0,
        job_name: str = "monarch",
        ntasks_per_node: int = 1,
        time_limit: str | float | None = None,
        partition: str | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        exclusive: bool = True,
        gpus_per_node: int | None = None,
        cpus_per_task: int | None = None,
        mem: str | None = None,
        job_start_timeout: float | None = None,
        account: str | None = None,
        qos: str | None = None,
        out_of_cluster: bool = False,
        attach_to: str | int | None = None,
        share_node: bool = False,
        *,
        constraint: str | None = None,
        reservation: str | None = None,
        gres: str | None = None,
        nodelist: str | None = None,
        exclude: str | None = None,
        way: str = "salloc",
        spares: int = 0,
        interface: str = "",
        shared_home: bool = True,
        **options: Any,
    ) -> None:
        wishes = {
            "partition": partition,
            "account": account,
            "qos": qos,
            "constraint": constraint,
            "reservation": reservation,
            "gres": gres,
            "nodelist": nodelist,
            "exclude": exclude,
            "ntasks_per_node": ntasks_per_node if ntasks_per_node > 1 else None,
        }
        resources = Resources(
            gpus=gpus_per_node or 0,
            cpus=cpus_per_task or 0,
            memory=_bytes(mem) if mem else 0,
            walltime=_seconds(time_limit) if time_limit is not None else 0.0,
            options={name: value for name, value in wishes.items() if value},
        )
        # The script of a batch job creates its job like the program that submitted it, and uses its allocation.
        batch = os.environ.get(environment.SLURM_BATCH, "")
        self._in_batch = bool(batch) and batch == os.environ.get("SLURM_JOB_ID") and attach_to is None
        launcher = SlurmLauncher(
            way,
            slurm_args,
            exclusive=exclusive and not share_node,
            spares=spares,
            port=monarch_port,
            interface=interface,
            folder="" if log_dir is None else os.fspath(log_dir),
            shared_home=shared_home,
            tunnel=out_of_cluster,
            allocation=batch if self._in_batch else str(attach_to or ""),
        )
        timeout = TIMEOUT if job_start_timeout is None else job_start_timeout
        options = {"timeout": timeout, "name": job_name, "python": python_exe, **options}
        super().__init__(launcher, meshes, resources=resources, **options)

    @classmethod
    def here(cls, meshes: Mapping[str, int] | None = None, **options: Any) -> SlurmJob:
        """Return the nodes of the allocation that this program runs in (``SLURM_JOB_ID``), of salloc or a batch script.

        Args:
            meshes: as for ``SlurmJob``; by default all nodes are the mesh ``hosts``.
            options: further arguments of ``SlurmJob``.

        Raises:
            LaunchError: this program does not run in an allocation.
        """
        job = os.environ.get("SLURM_JOB_ID", "")
        nodes = slurm_queue.expand(os.environ.get("SLURM_JOB_NODELIST", ""))
        if not job or not nodes:
            raise LaunchError(
                "this program runs in no allocation of Slurm (SLURM_JOB_ID is not set): start it by salloc or sbatch, "
                "or ask for hosts with SlurmJob({'hosts': 2})"
            )
        return cls({"hosts": len(nodes)} if meshes is None else meshes, attach_to=job, **options)

    def add_mesh(self, name: str, num_nodes: int) -> None:
        """Request another mesh, before the job is applied.

        Raises:
            RuntimeError: the job was applied.
            ValueError: the name is not an identifier, or the number is not positive.
        """
        self._check_new("add_mesh")
        self._requested = checked_meshes("SlurmJob", {**self._requested, name: num_nodes})

    def share_node(self, tasks_per_node: int, gpus_per_task: int, partition: str) -> None:
        """Share nodes with other jobs. Call this before the job is applied.

        Args:
            tasks_per_node: the number of Slurm tasks.
            gpus_per_task: devices for each of them.
            partition: the partition.

        Raises:
            RuntimeError: the job was applied.
        """
        self._check_new("share_node")
        assert isinstance(self._launcher, SlurmLauncher)
        self._launcher.share_nodes()
        options = {**self._resources.options, "partition": partition, "ntasks_per_node": tasks_per_node}
        self._resources = msgspec.structs.replace(self._resources, gpus=tasks_per_node * gpus_per_task, options=options)

    def apply(self, client_script: str | None = None) -> None:
        """Request the hosts. Does nothing if the job is active.

        Args:
            client_script: a Python script that runs on the first host once the hosts are available (batch mode). There,
                ``state()`` of an equal job returns all of them; the job ends with the script. ``log()`` returns its
                output.

        Raises:
            LaunchError: Slurm rejects the request.
            FileNotFoundError: the script does not exist.
        """
        if client_script is None:
            super().apply()
            return
        path = os.path.abspath(os.path.expanduser(client_script))
        if not os.path.isfile(path):
            raise FileNotFoundError(f"there is no script {path}, so nothing was submitted")
        if self.active:
            return
        self._script = [self._python or sys.executable, path]
        try:
            self._start()
        finally:
            self._script = None
        self.apply_id = secrets.token_hex(8)

    def _submit(self, request: LaunchRequest) -> Ticket:
        if self._script is None:
            return super()._submit(request)
        assert isinstance(self._launcher, SlurmLauncher)
        return self._launcher.submit_script(request, self._script)

    def state(self, cached_path: Path | None = CACHED_PATH) -> JobState:
        """See ``Job.state``. In the script of batch mode, its file is not used: the hosts are those of the allocation.

        Raises:
            LaunchError: the hosts belong to a script (batch mode).
        """
        ticket = self._record().ticket if self._id else None
        if ticket is not None and ticket.data.get("script"):
            raise LaunchError("the hosts of this job belong to its script: use status() and log()")
        return super().state(None if self._in_batch else cached_path)


def _seconds(limit: str | float) -> float:
    """Parse a walltime: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]. In seconds."""
    if isinstance(limit, float):
        return limit
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(limit).strip())
    if match is None:
        raise ValueError(
            f"{limit!r} is no time limit: write minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, as for Slurm"
        )
    days, *numbers = match.groups()
    given = [int(number) for number in numbers if number is not None]
    if days is not None:
        hours, minutes, seconds = (*given, 0, 0)[:3]
        return float(((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds)
    if len(given) == 1:
        return given[0] * 60.0
    seconds = 0
    for number in given:
        seconds = seconds * 60 + number
    return float(seconds)


def _bytes(memory: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", memory.strip().upper())
    if match is None:
        raise ValueError(f"{memory!r} is no amount of memory: write it as for Slurm, such as '64G'")
    return int(match[1]) * _UNITS[match[2]]
