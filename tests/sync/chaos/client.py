"""One sync, by a process that can be killed: ``python -m tests.sync.chaos.client KEY FOLDER URL...``."""

from __future__ import annotations

import sys

import msgspec

from monarch_kernel.actor import attach_to_workers, shutdown_context
from workspace_sync import Workspace, sync


def main(key: str, folder: str, *urls: str) -> None:
    """Attach, say so, and sync; the last line is the receipt."""
    hosts = attach_to_workers(workers=list(urls), key_file=key)
    print("attached", flush=True)
    report = sync(hosts, Workspace(dirs={folder: ""}))
    print(msgspec.json.encode(report).decode(), flush=True)
    shutdown_context().get(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
