"""What a host stores: whole trees that are switched at once, content by digest, and what is known of both.

``Store`` is the entry; ``docs/sync.md`` ("On a host") has the layout. It runs without actors, on any file system.
"""

from workspace_sync.store.cloning import Facts
from workspace_sync.store.early_tree import EarlyTree
from workspace_sync.store.examination import Problem
from workspace_sync.store.forgetting import Footprint
from workspace_sync.store.records import Generation
from workspace_sync.store.slot_change import FileRewriter
from workspace_sync.store.staging import Staging
from workspace_sync.store.store import Store
from workspace_sync.store.workspace_folder import WorkspaceFolder, WorkspaceState

__all__ = [
    "EarlyTree",
    "Facts",
    "FileRewriter",
    "Footprint",
    "Generation",
    "Problem",
    "Staging",
    "Store",
    "WorkspaceFolder",
    "WorkspaceState",
]
