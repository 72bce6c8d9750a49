"""Errors of a sync. Each message names the host, the path, and the next step."""

from __future__ import annotations


class SyncError(RuntimeError):
    """A sync did not do all that it was asked to; hosts that it names have kept their old tree.

    Attributes:
        report: what was done on each host (``SyncReport``), if the sync came so far; otherwise None.
        headline: the message without what the report has; empty if there is no report.
    """

    report: object | None = None
    headline: str = ""


class ScanError(SyncError):
    """The folder at the client cannot be read, or does not hold still."""


class WorkspaceBusyError(SyncError):
    """Another client syncs this workspace on this host; the message names it."""


class StoreError(SyncError):
    """A host cannot store the tree: full disk, read-only target, a name that is too long, a folder of another user."""


class TamperedError(SyncError):
    """Content on a host does not match its digest."""


class IncompatibleError(SyncError):
    """An environment cannot run on a host: another platform, C library or Python."""


class MountError(RuntimeError):
    """A folder could not be mounted, or its content has changed."""
