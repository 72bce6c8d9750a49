"""``CondaEnvironment``, as in ``monarch.tools.config.environment``; ``workspace_sync`` has the code."""

from workspace_sync.model.workspace import CondaEnvironment

__all__ = ["CondaEnvironment"]
