"""Store trees on a host: complete trees that are switched at once, content by digest, and the records of both.

``Store`` is the entry point; ``docs/sync.md`` ("On a host") describes the layout. The store runs without actors, on any
file system.
"""

from workspace_sync.store.early_tree import EarlyTree
from workspace_sync.store.kept import Footprint
from workspace_sync.store.records import Generation
from workspace_sync.store.staging import Staging
from workspace_sync.store.store import Store
from workspace_sync.store.workspace_folder import WorkspaceFolder, WorkspaceState

__all__ = [
    "EarlyTree",
    "Footprint",
    "Generation",
    "Staging",
    "Store",
    "WorkspaceFolder",
    "WorkspaceState",
]
