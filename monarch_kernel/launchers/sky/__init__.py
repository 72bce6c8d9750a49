"""Get hosts from SkyPilot."""

from monarch_kernel.launchers.sky.launcher import SkyLauncher

__all__ = ["SkyLauncher"]
