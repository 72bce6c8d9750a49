"""A scanned workspace: its manifest, and the content that belongs to it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import Manifest, digest_of, printable
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning.announcement import Announcement, LeftOut, announce, left_out, sizes_in
from workspace_sync.scanning.hashing import read_at
from workspace_sync.scanning.index import Record

#: Where a piece is: the folder in the tree, the name of the file, the offset and the size (bytes).
_Place = tuple[bytes, bytes, int, int]


def path_at_client(roots: Mapping[bytes, bytes], path: bytes) -> bytes:
    """Where a path of the tree is at the client.

    Args:
        roots: the folders of the client by their places in the tree.
        path: in the tree.
    """
    top = path
    while top not in roots:
        top = top.rpartition(b"/")[0]
    return roots[top] + (b"/" + path[len(top) :].strip(b"/") if len(path) > len(top) else b"")


class Scan:
    """What a workspace held when it was scanned. Its methods may be called on any thread.

    Attributes:
        workspace: its folders.
        manifest: its content.
        hashed: bytes that had to be read.
        notes: what a person should know of what is left out.
    """

    def __init__(
        self,
        workspace: Workspace,
        manifest: Manifest,
        roots: dict[bytes, bytes],
        records: dict[bytes, Record],
        reasons: list[str],
        hashed: int,
        notes: list[str],
    ) -> None:
        self.workspace = workspace
        self.manifest = manifest
        self.hashed = hashed
        self.notes = notes
        self._roots = {place: folder for folder, place in roots.items()}
        self._records = records
        self._reasons = reasons
        self._lock = threading.Lock()
        self._places: tuple[dict[bytes, _Place], dict[bytes, list[_Place]]] | None = None

    @property
    def ignored(self) -> list[LeftOut]:
        """What is left out, by which line of which file."""
        return left_out(self._records, self._reasons)

    def announcement(self) -> Announcement | None:
        """What a first sync is about to send; None if that is at most 10,000 files and 1 GB."""
        return announce(dict(sizes_in(self.manifest)), self._records, self._reasons, list(self.workspace.roots()))

    def read(self, digest: bytes, into: memoryview) -> None:
        """Read one piece: a file, or a chunk of one.

        Args:
            digest: of the piece.
            into: takes it; of its size.

        Raises:
            KeyError: the workspace has no such piece.
            ScanError: the file has changed since the scan.
        """
        first, others = self._pieces()
        place = first[digest]
        for folder, name, offset, size in (place, *others.get(digest, ())):
            if size == len(into) and read_at(self.path_of(folder, name), offset, into) and digest_of(into) == digest:
                return
        folder, name, _, _ = place
        raise ScanError(
            f"{printable(self.path_of(folder, name))} changed while it was read for the sync. Hosts keep the tree that "
            "they have; sync again when what writes it is done, or leave it out with a line in a .meshignore file."
        )

    def read_many(self, wanted: Iterable[tuple[bytes, memoryview]]) -> None:
        """Read several pieces, as ``read`` does.

        Raises:
            KeyError: the workspace has no such piece.
            ScanError: a file has changed since the scan.
        """
        for digest, into in wanted:
            self.read(digest, into)

    def path_of(self, place: bytes, name: bytes = b"") -> bytes:
        """Where a folder of the tree, or a file in it, is at the client."""
        path = path_at_client(self._roots, place)
        return path + b"/" + name if name else path

    def _pieces(self) -> tuple[dict[bytes, _Place], dict[bytes, list[_Place]]]:
        """Where each piece is, and where its copies are."""
        with self._lock:
            if self._places is None:
                first: dict[bytes, _Place] = {}
                others: dict[bytes, list[_Place]] = {}
                for place, folder in self.manifest.folders.items():
                    for name, entry in folder.files.items():
                        for digest, offset, size in entry.pieces():
                            here = (place, name, offset, size)
                            if first.setdefault(digest, here) is not here:
                                others.setdefault(digest, []).append(here)
                self._places = first, others
            return self._places
