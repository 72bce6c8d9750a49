"""Workspace sync: what a person has edited and installed, on every host a second later, verified, or not at all.

Usable without the kernel (``python -m workspace_sync``). ``docs/sync.md`` has what it promises and how it works. Names
are loaded when they are first used.
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
    from workspace_sync.model.progress import SyncProgress
    from workspace_sync.model.report import Forgotten, HostReport, Phases, StaleModule, SyncReport
    from workspace_sync.model.workspace import CondaEnvironment, Workspace
    from workspace_sync.mounts import gather_mount, remotemount
    from workspace_sync.reload.live import rollback, sync
    from workspace_sync.reload.watch import watch
    from workspace_sync.session import forget, status, verify

_LIVE = "workspace_sync.reload.live"
_MOUNTS = "workspace_sync.mounts"
_ERRORS = "workspace_sync.model.errors"
_REPORT = "workspace_sync.model.report"
_WORKSPACE = "workspace_sync.model.workspace"
_SESSION = "workspace_sync.session"
_PLACES = {
    "CondaEnvironment": _WORKSPACE,
    "Forgotten": _REPORT,
    "HostReport": _REPORT,
    "IncompatibleError": _ERRORS,
    "MountError": _ERRORS,
    "Phases": _REPORT,
    "SyncProgress": "workspace_sync.model.progress",
    "ScanError": _ERRORS,
    "StaleModule": _REPORT,
    "StoreError": _ERRORS,
    "SyncError": _ERRORS,
    "SyncReport": _REPORT,
    "TamperedError": _ERRORS,
    "Workspace": _WORKSPACE,
    "WorkspaceBusyError": _ERRORS,
    "forget": _SESSION,
    "gather_mount": _MOUNTS,
    "remotemount": _MOUNTS,
    "rollback": _LIVE,
    "status": _SESSION,
    "sync": _LIVE,
    "verify": _SESSION,
    "watch": "workspace_sync.reload.watch",
}

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
