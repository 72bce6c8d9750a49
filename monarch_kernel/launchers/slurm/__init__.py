"""Get hosts from Slurm."""

from monarch_kernel.launchers.slurm.launcher import SlurmLauncher

__all__ = ["SlurmLauncher"]
