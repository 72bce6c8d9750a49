"""Folders of other machines as mounts: ``remotemount`` (one of the client, on all hosts) and ``gather_mount`` (those of
all hosts, at the client).

They need ``/dev/fuse``, and the program ``fusermount3`` for users other than root. Nothing else of this package does.
"""

from workspace_sync.model.errors import MountError
from workspace_sync.mounts.gather import GatherMount, gather_mount
from workspace_sync.mounts.remote import MountHandler, remotemount

__all__ = ["GatherMount", "MountError", "MountHandler", "gather_mount", "remotemount"]
