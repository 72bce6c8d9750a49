"""Jobs: hosts that a program requests by name. Names and semantics are those of ``monarch.job``.

``EngineJob`` takes hosts from any engine, through a launcher (``monarch_kernel.launchers.base``). This module holds
names only; ``monarch_kernel.launchers`` has the code.
"""

from monarch_kernel.launchers.engine_job import EngineJob
from monarch_kernel.launchers.job import JobState, job_load, job_loads
from monarch_kernel.launchers.job_trait import JobTrait
from monarch_kernel.launchers.kubernetes_job import KubernetesJob
from monarch_kernel.launchers.lightning_job import LightningJob
from monarch_kernel.launchers.local import LocalJob
from monarch_kernel.launchers.process import ProcessJob
from monarch_kernel.launchers.ray_job import RayJob
from monarch_kernel.launchers.sky_job import SkyPilotJob
from monarch_kernel.launchers.slurm_job import SlurmJob
from monarch_kernel.launchers.ssh import SSHJob

__all__ = [
    "EngineJob",
    "JobState",
    "JobTrait",
    "KubernetesJob",
    "LightningJob",
    "LocalJob",
    "ProcessJob",
    "RayJob",
    "SSHJob",
    "SkyPilotJob",
    "SlurmJob",
    "job_load",
    "job_loads",
]
