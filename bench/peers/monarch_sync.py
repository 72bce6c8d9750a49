"""torchmonarch's own ``sync_workspace``: its client, or with ``worker URL`` one of its workers."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from pathlib import Path
from typing import Any

from bench.sync.service import serve

hosts: Any = None


def attach(workers: list[str]) -> None:
    """Connect to workers."""
    global hosts
    hosts = importlib.import_module("monarch.actor").attach_to_workers(ca="trust_all_connections", workers=workers)


def sync(source: str) -> dict[str, Any]:
    """Make the workers' copies equal to a folder; return the seconds."""
    workspace = importlib.import_module("monarch.tools.config.workspace").Workspace(dirs=[Path(source)])

    async def wait() -> None:
        await hosts.sync_workspace(workspace, conda=False, auto_reload=False)

    began = time.perf_counter()
    asyncio.run(wait())
    return {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        importlib.import_module("monarch.actor").run_worker_loop_forever(
            address=sys.argv[2], ca="trust_all_connections"
        )
    serve({"attach": attach, "sync": sync})
