"""Scan workspaces at the client: which files there are, their content, and which are left out."""

from workspace_sync.scanning.announcement import Announcement
from workspace_sync.scanning.hashing import ContentTaker
from workspace_sync.scanning.index import Index
from workspace_sync.scanning.scanner import Scan, read_first, scan

__all__ = ["Announcement", "ContentTaker", "Index", "Scan", "read_first", "scan"]
