"""Sync workspaces: edited files and installed packages reach every host in about a second, verified or not at all.

Usable without the kernel (``python -m workspace_sync``). ``docs/sync.md`` describes its guarantees and how it works.
Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workspace_sync.model.errors import (
        IncompatibleError,
        MountError,
        ScanError,
        StoreError,
        SyncError,
        TamperedError,
        WorkspaceBusyError,
    )
    from workspace_sync.model.sync_report import Forgotten, HostReport, Phases, StaleModule, SyncProgress, SyncReport
    from workspace_sync.model.workspace import CondaEnvironment, Workspace
    from workspace_sync.mounts import gather_mount, remotemount
    from workspace_sync.reload.file_events import watch
    from workspace_sync.reload.live import rollback, sync
    from workspace_sync.session import forget, status, verify

#: The names of each module.
_MODULES = {
    "model.errors": "IncompatibleError MountError ScanError StoreError SyncError TamperedError WorkspaceBusyError",
    "model.sync_report": "Forgotten HostReport Phases StaleModule SyncProgress SyncReport",
    "model.workspace": "CondaEnvironment Workspace",
    "mounts": "gather_mount remotemount",
    "reload.live": "rollback sync",
    "reload.file_events": "watch",
    "session": "forget status verify",
}
_PLACES = {name: f"workspace_sync.{module}" for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "CondaEnvironment",
    "Forgotten",
    "HostReport",
    "IncompatibleError",
    "MountError",
    "Phases",
    "ScanError",
    "StaleModule",
    "StoreError",
    "SyncError",
    "SyncProgress",
    "SyncReport",
    "TamperedError",
    "Workspace",
    "WorkspaceBusyError",
    "forget",
    "gather_mount",
    "remotemount",
    "rollback",
    "status",
    "sync",
    "verify",
    "watch",
]


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(place), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
