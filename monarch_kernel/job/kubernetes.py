"""Jobs on Kubernetes. The names are those of ``monarch.job.kubernetes``; ``monarch_kernel.launchers`` has the code."""

from monarch_kernel.launchers.kubernetes.config import KubeConfig
from monarch_kernel.launchers.kubernetes.job import KubernetesJob
from monarch_kernel.launchers.kubernetes.specs import ImageSpec

__all__ = ["ImageSpec", "KubeConfig", "KubernetesJob"]
