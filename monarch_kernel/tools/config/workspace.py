"""``Workspace``, as in ``monarch.tools.config.workspace``; ``workspace_sync`` has the code."""

from workspace_sync.model.workspace import CondaEnvironment, Workspace

__all__ = ["CondaEnvironment", "Workspace"]
