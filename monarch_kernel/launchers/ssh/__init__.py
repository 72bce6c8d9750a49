"""Get hosts by ssh."""

from monarch_kernel.launchers.ssh.launcher import SSHLauncher

__all__ = ["SSHLauncher"]
