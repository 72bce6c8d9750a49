"""Reads pieces back from slots that are being made, for blocks that are no longer in memory."""

from __future__ import annotations

import os
import threading

from workspace_sync.model.errors import StoreError
from workspace_sync.model.manifest import digest_of
from workspace_sync.store import Staging


class SlotReader:
    """Where each piece of a staging is. Files that are rewritten for this host have none.

    Args:
        staging: what is being made.
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
        """Read a piece, and check it.

        Raises:
            StoreError: it is not here, or not as it should be.
        """
        place = self._places.get(digest)
        if place is None:
            raise StoreError(f"the piece {digest.hex()[:12]} cannot be read back")
        number, path, offset = place
        with self._guard:  # a tree keeps the folders that it has opened
            fd = self._staging.changes[number].tree.open_file(path)
        try:
            read = os.preadv(fd, [into], offset)
        finally:
            os.close(fd)
        if read != len(into) or digest_of(into) != digest:
            raise StoreError(f"the piece {digest.hex()[:12]} is not complete yet")
