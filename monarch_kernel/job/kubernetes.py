"""Export jobs on Kubernetes with the names of ``monarch.job.kubernetes``; the code is in ``launchers.kubernetes``."""

from monarch_kernel.launchers.kubernetes.config import KubeConfig
from monarch_kernel.launchers.kubernetes.job import KubernetesJob
from monarch_kernel.launchers.kubernetes.specs import ImageSpec

__all__ = ["ImageSpec", "KubeConfig", "KubernetesJob"]
