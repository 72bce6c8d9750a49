"""``SkyPilotJob``: hosts from SkyPilot."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_kernel.launchers.engine_job import EngineJob
from monarch_kernel.launchers.sky import IDLE_MINUTES, PYTHON, SkyLauncher


class SkyPilotJob(EngineJob):
    """Hosts from SkyPilot: the nodes of a cluster, with a worker on each (``docs/sky.md``).

    Args:
        meshes: the number of hosts of each mesh, by its name. They are one cluster.
        resources: what each host must have: a ``sky.Resources``, or the fields of ``resources:`` in SkyPilot's YAML,
            such as ``{"accelerators": "H100:8", "infra": "k8s", "use_spot": True}``.
        cluster_name: the name of a cluster that is used if it is there, and then stays, and is made else. By default
            the job makes one of its own.
        monarch_port: where workers listen; 0: any free port.
        idle_minutes_to_autostop: how long a cluster without workers stays; None: until the job is killed.
        down_on_autostop: whether it is removed then; False: it is stopped.
        python_exe: the interpreter on the hosts, as the commands of SkyPilot's tasks find it.
        setup_commands: what runs once on each host, such as an installation of monarch_kernel.
        workdir: a folder here that the hosts get.
        file_mounts: what else they get: paths there, and here or in a bucket.
        retry_until_up: whether SkyPilot asks again until it gets the hosts.
        tunnel: whether workers are reached through ssh, as their ports are closed; None: where it is needed.
        ssh: the command, with further options.
        sky: SkyPilot's command, or the interpreter that has SkyPilot; by default this one, or else ``sky`` of PATH.
        options: those of ``EngineJob``.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        resources: Any = None,
        cluster_name: str | None = None,
        monarch_port: int = 0,
        idle_minutes_to_autostop: int | None = IDLE_MINUTES,
        down_on_autostop: bool = True,
        python_exe: str = PYTHON,
        setup_commands: str | None = None,
        workdir: str | os.PathLike[str] | None = None,
        file_mounts: Mapping[str, Any] | None = None,
        *,
        retry_until_up: bool = False,
        tunnel: bool | None = None,
        ssh: Sequence[str] = ("ssh",),
        sky: str = "",
        **options: Any,
    ) -> None:
        launcher = SkyLauncher(
            _fields(resources),
            cluster=cluster_name or "",
            setup=setup_commands or "",
            workdir=os.fspath(workdir or ""),
            file_mounts=file_mounts,
            idle_minutes=idle_minutes_to_autostop,
            down=down_on_autostop,
            retry=retry_until_up,
            port=monarch_port,
            tunnel=tunnel,
            ssh=ssh,
            sky=sky,
        )
        super().__init__(launcher, meshes, python=python_exe, **options)


def _fields(resources: Any) -> dict[str, Any]:
    """The fields of a ``sky.Resources``, or those that are given."""
    if resources is None or isinstance(resources, Mapping):
        return dict(resources or {})
    try:
        return dict(resources.to_yaml_config())
    except AttributeError:
        raise TypeError(
            f"resources={resources!r}: give a sky.Resources, or SkyPilot's fields, such as {{'accelerators': 'H100:8'}}"
        ) from None
