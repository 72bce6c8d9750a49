"""Stage the next trees of a workspace on one host beside the current ones, and switch to them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from workspace_sync.model.errors import StoreError
from workspace_sync.model.manifest import digest_of
from workspace_sync.store.examination import Problem
from workspace_sync.store.records import Generation
from workspace_sync.store.slot_change import SlotChange, verified
from workspace_sync.store.tree import Descriptor


class Staging:
    """Trees that are being created; ``WorkspaceFolder.stage`` returns one. It holds the workspace's lock throughout.

    Attributes:
        digest: of the tree (part "tree"); empty if there is none.
        changes: the changes of slots.
        notes: sentences on damaged or incomplete content that was found, and how it was handled.
    """

    def __init__(
        self,
        digest: bytes,
        changes: list[SlotChange],
        commit: Callable[[], Generation],
        abort: Callable[[], None],
        notes: list[str],
    ) -> None:
        self.digest = digest
        self.changes = changes
        self.notes = notes
        self._commit = commit
        self._abort = abort
        self._state = "staging"

    @property
    def missing(self) -> list[tuple[bytes, int]]:
        """The (digest, size) of the pieces that this host does not have."""
        found: dict[bytes, int] = {}
        for change in self.changes:
            found.update(change.missing())
        return list(found.items())

    @property
    def files(self) -> int:
        """The number of files created so far."""
        return sum(change.files for change in self.changes)

    @property
    def reused(self) -> int:
        """The number of bytes that this host already had."""
        return sum(change.reused for change in self.changes)

    @property
    def problems(self) -> list[Problem]:
        """Content that was found damaged when it was to be used; it counts as missing instead."""
        return [problem for change in self.changes for problem in change.sources.problems]

    def put(self, digest: bytes, data: memoryview) -> None:
        """Verify a missing piece and write it directly to its place. Pieces may come in any order, from any thread.

        Raises:
            TamperedError: it does not match its digest.
            StoreError: it cannot be written.
        """
        verified(digest, data)
        for change in self.changes:
            change.put(digest, data)

    def finish(self) -> bytes:
        """Complete the trees; return the digest of the tree.

        Raises:
            StoreError: pieces are missing, or something cannot be written.
        """
        if self._state != "staging":
            raise StoreError(f"this staging is {self._state}: stage again")
        for change in self.changes:
            change.finish()
        self._state = "finished"
        return self.digest

    def commit(self) -> Generation:
        """Switch to the trees; return the new generation, or the current one if nothing changes.

        Raises:
            StoreError: the staging is not finished, or the switch cannot be made.
        """
        if self._state != "finished":
            raise StoreError(f"only a finished staging is switched to, and this one is {self._state}: finish it first")
        generation = self._commit()
        self._state = "committed"
        return generation

    def abort(self) -> None:
        """Drop the trees: created files are removed."""
        if self._state in ("staging", "finished"):
            self._state = "aborted"
            self._abort()


class SlotReader:
    """Reader of the pieces of a staging, without files that are rewritten for this host.

    Args:
        staging: the trees that are being created.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._guard = threading.Lock()
        self._places: dict[bytes, tuple[int, bytes, int]] = {}
        for number, change in enumerate(staging.changes):
            for path, entry in change.target.manifest.files():
                if entry.rewrite is None:
                    for digest, offset, _ in entry.pieces():
                        self._places.setdefault(digest, (number, path, offset))

    def read(self, digest: bytes, into: memoryview) -> None:
        """Read and verify a piece.

        Raises:
            StoreError: it is missing or damaged.
        """
        place = self._places.get(digest)
        if place is None:
            raise StoreError(f"the piece {digest.hex()[:12]} cannot be read back")
        number, path, offset = place
        with self._guard:  # a tree caches the folders that it has opened
            fd = self._staging.changes[number].tree.open_file(path)
        with Descriptor(fd):
            read = os.preadv(fd, [into], offset)
        if read != len(into) or digest_of(into) != digest:
            raise StoreError(f"the piece {digest.hex()[:12]} is not complete yet")
