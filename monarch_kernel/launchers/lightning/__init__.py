"""Get hosts from the Lightning platform."""

from monarch_kernel.launchers.lightning.launcher import LightningLauncher

__all__ = ["LightningLauncher"]
