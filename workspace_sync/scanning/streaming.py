"""What a scan offers while it reads: the content of each file, in the memory that it was hashed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workspace_sync.model.early import EarlyFile
from workspace_sync.scanning.announcement import Announcement

#: The most content in one memory (bytes), and the most bytes of paths and digests that describe it.
CONTENT = 7 << 19
ABOUT = 1 << 19
#: What a row takes beside its path and its digests, at most (bytes).
ROW = 64


@dataclass(frozen=True)
class ScanPlan:
    """What a scan is about to read.

    Attributes:
        roots: the folders of the client by their places in the tree.
        files: how many.
        bytes: their sizes, as listed.
        announcement: what a person should know before it is sent; None: it is not much.
    """

    roots: dict[bytes, bytes]
    files: int
    bytes: int
    announcement: Announcement | None


class ContentTaker(Protocol):
    """Takes content while a scan goes on. Called by the threads of the scan."""

    def planned(self, plan: ScanPlan) -> None:
        """The scan knows what it reads, and begins."""
        ...

    def take(self) -> memoryview | None:
        """Memory for ``CONTENT`` and its description, perhaps after a wait; None: nothing is wanted any more."""
        ...

    def give(self, memory: memoryview, used: int, files: list[EarlyFile]) -> None:
        """Memory of ``take`` is filled.

        Args:
            used: so many bytes of it are content.
            files: what that is, in its order; without any, the memory goes back.
        """
        ...
