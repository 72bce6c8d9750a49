"""Mount folders of all hosts on this machine, as in ``monarch.gather_mount``; ``workspace_sync`` has the code."""

from workspace_sync.mounts import GatherMount, MountError, gather_mount

__all__ = ["GatherMount", "MountError", "gather_mount"]
