"""Errors of a sync. Each message names the host, the path, and the next step."""

from __future__ import annotations


class SyncError(RuntimeError):
    """A sync was not completed on all hosts. The hosts that the message names keep their old tree.

    Attributes:
        report: the result on each host (``SyncReport``); None if the sync ended before there was one.
        headline: the message without the content of the report; empty if there is no report.
    """

    report: object | None = None
    headline: str = ""


class ScanError(SyncError):
    """The folder at the client cannot be read, or keeps changing."""


class WorkspaceBusyError(SyncError):
    """Another client, which the message names, syncs this workspace on this host."""


class StoreError(SyncError):
    """A host cannot store the tree: full disk, read-only target, a name that is too long, or another user's folder."""


class TamperedError(SyncError):
    """Content on a host does not match its digest."""


class IncompatibleError(SyncError):
    """An environment cannot run on a host because of its platform, C library or Python."""


class MountError(RuntimeError):
    """A folder could not be mounted, or its content has changed."""
