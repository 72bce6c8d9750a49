"""Mount folders of this machine on hosts, as in ``monarch.remotemount``; ``workspace_sync`` has the code."""

from workspace_sync.mounts import MountError, MountHandler, remotemount

__all__ = ["MountError", "MountHandler", "remotemount"]
