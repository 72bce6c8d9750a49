"""``RayJob``: hosts from Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monarch_kernel.launchers.base import Resources
from monarch_kernel.launchers.engine_job import EngineJob
from monarch_kernel.launchers.ray import RayLauncher


class RayJob(EngineJob):
    """Hosts from Ray: places of its nodes, with a worker in each (``docs/ray.md``).

    Args:
        meshes: the number of hosts of each mesh, by its name. They are one placement group.
        address: of the cluster, as for ``ray.init``. By default that to which the program is connected, that which
            ``RAY_ADDRESS`` names, or that of this machine.
        cpus: processors of each host, as Ray counts them.
        gpus: devices of each host; Ray chooses them.
        memory: of each host (bytes), as Ray counts it.
        resources: custom resources of each host, such as ``{"TPU": 4}``.
        strategy: "STRICT_SPREAD" (each host on a node of its own), "SPREAD", "PACK" or "STRICT_PACK".
        spares: how many more places are asked for, in which lost hosts are replaced at once.
        port: where workers listen; 0: any free port.
        autoscaling: whether nodes may be added to the cluster, so that a request waits which no node can fulfil.
        runtime_env: Ray's environment for the workers; by default that of the program.
        options: those of ``EngineJob``.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        address: str = "",
        *,
        cpus: int = 1,
        gpus: int = 0,
        memory: int = 0,
        resources: Mapping[str, float] | None = None,
        strategy: str = "STRICT_SPREAD",
        spares: int = 0,
        port: int = 0,
        autoscaling: bool = False,
        runtime_env: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        launcher = RayLauncher(
            address, strategy, spares=spares, port=port, autoscaling=autoscaling, runtime_env=runtime_env
        )
        custom = {"resources": dict(resources)} if resources else {}
        needs = Resources(gpus=gpus, cpus=cpus, memory=memory, options=custom)
        super().__init__(launcher, meshes, resources=needs, **options)
