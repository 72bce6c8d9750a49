"""What ``sync_workspace`` of host and proc meshes does; the runtime loads this module when it is first called."""

from __future__ import annotations

import asyncio
from typing import Any

from workspace_sync.model.report import SyncReport
from workspace_sync.model.workspace import CondaEnvironment, Workspace
from workspace_sync.reload import sync_live


async def sync_workspace(mesh: Any, workspace: Workspace, conda: bool, auto_reload: bool) -> SyncReport:
    """See ``HostMesh.sync_workspace``."""
    if not isinstance(workspace, Workspace):
        raise TypeError(f"sync_workspace() takes a Workspace, as in Workspace(dirs=['.']), not {workspace!r}")
    env = (workspace.env or CondaEnvironment()) if conda else None
    wanted = Workspace(workspace.dirs, env, links=workspace.links)
    live = await asyncio.to_thread(sync_live, mesh, wanted, how="reload" if auto_reload else None)
    return live.sync
