"""Reload that reaches live code: after a sync, what ranks have imported follows the files, in one of three ways.

``contact`` before a switch, ``stale_modules`` and ``refresh`` after it; ``refresh_here`` for the client's own modules;
``selection_of`` for the modes of ``%autoreload``; ``watch`` syncs and refreshes at every save.
"""

from workspace_sync.reload.client import contact, enter, folders_of, refresh, refresh_here, stale_modules
from workspace_sync.reload.report import ModuleReport, RankReport, Refreshed
from workspace_sync.reload.selection import Selection, selection_of

__all__ = [
    "ModuleReport",
    "RankReport",
    "Refreshed",
    "Selection",
    "contact",
    "enter",
    "folders_of",
    "refresh",
    "refresh_here",
    "selection_of",
    "stale_modules",
]
