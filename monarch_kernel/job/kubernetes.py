"""Export jobs on Kubernetes with the names of ``monarch.job.kubernetes``; the code is in ``launchers.kubernetes``."""

from monarch_kernel.launchers.kubernetes.api import KubeConfig
from monarch_kernel.launchers.kubernetes.job import ImageSpec, KubernetesJob

__all__ = ["ImageSpec", "KubeConfig", "KubernetesJob"]
