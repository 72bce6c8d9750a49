"""Reload live code: after a sync, imported modules follow their files, in one of three ways.

``sync_live`` syncs and refreshes, and ``watch`` does so at every save. The single steps are ``contact`` before a
switch, and ``stale_modules`` and ``refresh`` after it. ``refresh_here`` reloads the client's own modules;
``selection_of`` parses the modes of ``%autoreload``.
"""

from workspace_sync.reload.client import contact, enter, folders_of, refresh, refresh_here, stale_modules
from workspace_sync.reload.file_events import SyncEvent, Watcher, watch
from workspace_sync.reload.live import LiveReport, meshes_on, sync_live
from workspace_sync.reload.refresh_report import ModuleReport, ModuleSelection, RankReport, Refreshed, selection_of

__all__ = [
    "LiveReport",
    "ModuleReport",
    "ModuleSelection",
    "RankReport",
    "Refreshed",
    "SyncEvent",
    "Watcher",
    "contact",
    "enter",
    "folders_of",
    "meshes_on",
    "refresh",
    "refresh_here",
    "selection_of",
    "stale_modules",
    "sync_live",
    "watch",
]
