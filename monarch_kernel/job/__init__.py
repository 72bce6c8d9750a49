"""Jobs: hosts that a program requests by name. Names and semantics are those of ``monarch.job``.

``EngineJob`` gets hosts from any provider, through a launcher (``monarch_kernel.launchers.base``). This module only
exports names; ``monarch_kernel.launchers`` has the code.
"""

from typing import TYPE_CHECKING, Any

from monarch_kernel.launchers.current_job import (
    exec_command,
    hosts_from_config,
    load_current_job,
    set_current_job,
    shell,
)
from monarch_kernel.launchers.engine_job import EngineJob
from monarch_kernel.launchers.job import CACHED_PATH as DEFAULT_JOB_PATH
from monarch_kernel.launchers.job import (
    SERVICE_PROC_IDS_ENV,
    SERVICE_PROC_RANK_ENV,
    JobState,
    JobTrait,
    LocalJob,
    deserialize_service_proc_ids,
    job_load,
    job_loads,
    new_service_proc_id,
    ranked_service_proc_id_from_env,
    serialize_service_proc_ids,
    service_proc_addr,
    service_proc_addrs,
)
from monarch_kernel.launchers.kubernetes.job import KubernetesJob
from monarch_kernel.launchers.lightning import LightningJob
from monarch_kernel.launchers.process import ProcessJob
from monarch_kernel.launchers.ray.launcher import RayJob
from monarch_kernel.launchers.services import MeshAdminConfig, TelemetryConfig
from monarch_kernel.launchers.sky.launcher import SkyPilotJob
from monarch_kernel.launchers.slurm.launcher import SlurmJob
from monarch_kernel.launchers.ssh import SSHJob

if TYPE_CHECKING:
    from monarch_kernel.launchers.port_forward import PortForwarder

__all__ = [
    "DEFAULT_JOB_PATH",
    "SERVICE_PROC_IDS_ENV",
    "SERVICE_PROC_RANK_ENV",
    "EngineJob",
    "JobState",
    "JobTrait",
    "KubernetesJob",
    "LightningJob",
    "LocalJob",
    "MeshAdminConfig",
    "PortForwarder",
    "ProcessJob",
    "RayJob",
    "SSHJob",
    "SkyPilotJob",
    "SlurmJob",
    "TelemetryConfig",
    "deserialize_service_proc_ids",
    "exec_command",
    "hosts_from_config",
    "job_load",
    "job_loads",
    "load_current_job",
    "new_service_proc_id",
    "ranked_service_proc_id_from_env",
    "serialize_service_proc_ids",
    "service_proc_addr",
    "service_proc_addrs",
    "set_current_job",
    "shell",
]


def __getattr__(name: str) -> Any:
    if name == "PortForwarder":  # not with the others, because it loads asyncio
        from monarch_kernel.launchers.port_forward import PortForwarder

        return PortForwarder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
