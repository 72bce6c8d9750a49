"""Get hosts from Kubernetes."""

from monarch_kernel.launchers.kubernetes.launcher import KubernetesLauncher

__all__ = ["KubernetesLauncher"]
