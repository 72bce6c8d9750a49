"""Where a host keeps the blocks of its mounts while they last."""

from __future__ import annotations

from workspace_sync.model.errors import MountError, StoreError
from workspace_sync.store import Store


def spool_folder() -> str:
    """A folder of this user's store, made if it does not exist.

    Raises:
        MountError: another user could change it, or it cannot be made.
    """
    try:
        with Store() as store, store.private_folder("mounts") as folder:
            return folder.path
    except StoreError as e:
        raise MountError(str(e)) from None
