"""Workspace sync as a method of host and proc meshes; ``workspace_sync`` is loaded on first use."""

from __future__ import annotations

from typing import Any

from monarch_kernel.runtime.actor.extensions import workspace_functions


class WorkspaceMethods:
    """The method `sync_workspace` of a mesh of hosts or procs; on a slice, it applies to the hosts of the slice."""

    async def sync_workspace(self, workspace: Any, conda: bool = False, auto_reload: bool = False) -> Any:
        """Sync folders of this machine, and optionally an environment, to all hosts of this mesh.

        Ranks that are spawned afterwards run in the synced tree. ``docs/sync.md`` describes the guarantees.

        Args:
            workspace: a ``monarch.tools.config.workspace.Workspace``.
            conda: sync its environment, too: ``workspace.env``, or that of this process.
            auto_reload: reload changed modules in ranks and live actors of this controller on these hosts.

        Returns:
            The report, a ``workspace_sync.SyncReport``.

        Raises:
            SyncError: a host stays on its old tree; the message names the host and the cause, and ``report`` is the
                report.
        """
        return await workspace_functions().sync_workspace(self, workspace, conda, auto_reload)
