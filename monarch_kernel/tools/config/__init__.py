"""What is synced, by the names of ``monarch.tools.config``; ``workspace_sync`` has the code."""

from workspace_sync.model.workspace import Workspace

__all__ = ["Workspace"]
