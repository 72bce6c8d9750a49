"""Mount folders of other machines: ``remotemount`` (a folder of the client on all hosts) and ``gather_mount``.

Mounts need ``/dev/fuse``, and the program ``fusermount3`` for users other than root. The rest of the package does not.
"""

from workspace_sync.model.errors import MountError
from workspace_sync.mounts.gathered_tree import GatherMount, gather_mount
from workspace_sync.mounts.remote import MountHandler, remotemount

__all__ = ["GatherMount", "MountError", "MountHandler", "gather_mount", "remotemount"]
