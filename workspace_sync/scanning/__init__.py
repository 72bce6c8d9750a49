"""The client's side of a sync: which files there are, what they hold, and what is left out."""

from workspace_sync.scanning.announcement import Announcement
from workspace_sync.scanning.index import Index
from workspace_sync.scanning.result import Scan
from workspace_sync.scanning.scanner import scan
from workspace_sync.scanning.streaming import ContentTaker

__all__ = ["Announcement", "ContentTaker", "Index", "Scan", "scan"]
