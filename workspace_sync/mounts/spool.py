"""Where a host keeps the blocks of its mounts while they last."""

from __future__ import annotations

import os


def spool_folder() -> str:
    path = os.environ.get("MONARCH_KERNEL_SYNC_FOLDER") or os.path.expanduser("~/.cache/monarch_kernel/sync")
    os.makedirs(path, 0o700, exist_ok=True)
    return path
