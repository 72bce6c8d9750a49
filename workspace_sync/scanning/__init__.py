"""Scan workspaces at the client: find the files and their content, and leave out ignored entries."""

from workspace_sync.scanning.hashing import ContentTaker
from workspace_sync.scanning.index import Announcement, Index
from workspace_sync.scanning.scanner import Scan, read_first, scan

__all__ = ["Announcement", "ContentTaker", "Index", "Scan", "read_first", "scan"]
