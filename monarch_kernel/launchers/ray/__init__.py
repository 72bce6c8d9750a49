"""Get hosts from Ray."""

from monarch_kernel.launchers.ray.launcher import RayLauncher

__all__ = ["RayLauncher"]
