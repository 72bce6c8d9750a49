"""Locate content on this host: in trees, by their manifests, and in objects. Content is hashed at every use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from workspace_sync.model.manifest import FileEntry, Folder, digest_of, entry_path, printable
from workspace_sync.store.examination import HeldManifest, Problem
from workspace_sync.store.objects import Objects
from workspace_sync.store.tree import Descriptor, TreeFolder

#: From this number of files on, the objects are listed first instead of being tried individually.
_MANY = 256


@dataclass(frozen=True)
class Donor:
    """A tree whose files may be used.

    Attributes:
        tree: its folder.
        held: its expected content.
        steady: whether nothing changes it now, so that content that differs from its manifest is worth a report.
    """

    tree: TreeFolder
    held: HeldManifest
    steady: bool = True


@dataclass(frozen=True)
class ContentLocation:
    """Expected location of some content.

    Attributes:
        donor: the tree.
        path: of the file in it.
        offset: where in the file it begins (bytes).
        size: its size (bytes).
    """

    donor: Donor
    path: bytes
    offset: int
    size: int


class Sources:
    """Content on this host that can be used for a tree.

    Args:
        objects: of the store.
        donors: trees, in order of likely common files.
        more: called with the number of bytes not found in these; returns further trees.
    """

    def __init__(
        self,
        objects: Objects,
        donors: Sequence[Donor],
        more: Callable[[int], Sequence[Donor]] | None = None,
    ) -> None:
        self.objects = objects
        self.donors = donors
        self._more = more
        self._places: dict[bytes, ContentLocation] = {}
        self._listed: set[bytes] | None = None
        self._known: dict[tuple[bytes, object], tuple[bytes, int]] = {}
        #: Content that was found damaged when it was to be used.
        self.problems: list[Problem] = []

    def expect(self, files: int) -> None:
        """Prepare for this number of files."""
        self._listed = self.objects.names() if files > _MANY else None

    def learn(self, held: HeldManifest) -> None:
        """Record the rewritten form of originals on this host, from a tree that contains it."""
        for path, content in held.rewritten.items():
            entry = held.manifest.file(path)
            if entry is not None:
                self._known[entry.digest, entry.rewrite] = content

    def content(self, entry: FileEntry) -> tuple[bytes, int] | None:
        """Return the (digest, size) that a file will have on this host; None: unknown before it is rewritten."""
        if entry.rewrite is None:
            return entry.digest, entry.size
        return self._known.get((entry.digest, entry.rewrite))

    # -- whole files ---------------------------------------------------------------------------------------

    def near(self, path: bytes, content: tuple[bytes, int]) -> Iterator[ContentLocation]:
        """Locate a whole file at the same path of other trees."""
        for donor in self.donors:
            entry = donor.held.manifest.file(path)
            if entry is not None and donor.held.content(path, entry) == content:
                yield ContentLocation(donor, path, 0, content[1])

    def open_object(self, digest: bytes) -> int | None:
        """Open an object; return None if there is none."""
        if self._listed is not None and digest not in self._listed:
            return None
        return self.objects.open(digest)

    def object_made(self, digest: bytes) -> None:
        """Record a new object."""
        if self._listed is not None:
            self._listed.add(digest)

    def place(self, digest: bytes) -> ContentLocation | None:
        """Return the location found by ``locate``."""
        return self._places.get(digest)

    def damaged(self, place: ContentLocation) -> None:
        """Record that content does not match its digest."""
        if place.donor.steady:
            path = f"{place.donor.tree.path}/{printable(place.path)}"
            self.problems.append(Problem(path, "its content was changed"))

    def damaged_object(self, digest: bytes) -> None:
        """Remove an object that does not match its name."""
        self.problems.append(Problem(self.objects.path_of(digest), "the content of this object was changed"))
        self.objects.remove(digest)

    # -- pieces ----------------------------------------------------------------------------------------------

    def locate(self, wanted: Iterable[bytes], sizes: dict[bytes, int]) -> None:
        """Search content, whole files and pieces of large ones, in all trees.

        Args:
            wanted: the digests of the content.
            sizes: the sizes of files, by digest, which decide whether further trees are worth a search.
        """
        left = set(wanted)
        self._search(left, self.donors)
        if self._more is not None and left:
            lacking = sum(size for digest, size in sizes.items() if digest in left)
            self._search(left, self._more(lacking))

    def _search(self, left: set[bytes], donors: Sequence[Donor]) -> None:
        def found(digest: bytes, place: ContentLocation) -> None:
            if digest in left:
                left.discard(digest)
                self._places[digest] = place

        for donor in donors:
            for path, (digest, size) in donor.held.rewritten.items():
                found(digest, ContentLocation(donor, path, 0, size))
            for path, folder in donor.held.manifest.folders.items():
                if left.isdisjoint(_digests(folder)):
                    continue
                for name, entry in folder.files.items():
                    if entry.rewrite is None:
                        found(entry.digest, ContentLocation(donor, entry_path(path, name), 0, entry.size))
                        for digest, offset, size in entry.pieces() if entry.chunks else ():
                            found(digest, ContentLocation(donor, entry_path(path, name), offset, size))

    def piece(self, digest: bytes, size: int) -> bytes | None:
        """Return the content of a piece; None: this host does not have it."""
        place = self._places.get(digest)
        if place is not None and place.size == size:
            data = _read(place)
            if data is not None and digest_of(data) == digest:
                return data
            self.damaged(place)
        fd = self.open_object(digest)
        if fd is None:
            return None
        with Descriptor(fd):
            data = os.pread(fd, size + 1, 0)
        if digest_of(data) == digest:
            return data
        self.damaged_object(digest)
        return None


#: Cache of ``_digests``, by the digest of a folder.
_known_digests: dict[bytes, frozenset[bytes]] = {}
_MOST_KNOWN = 1 << 16


def _digests(folder: Folder) -> frozenset[bytes]:
    """Return the digests of all content in a folder; cached, because trees of one workspace share most folders."""
    found = _known_digests.get(folder.digest)
    if found is None:
        found = frozenset(
            digest
            for entry in folder.files.values()
            if entry.rewrite is None
            for digest in (entry.digest, *entry.chunks)
        )
        if len(_known_digests) >= _MOST_KNOWN:
            _known_digests.clear()
        _known_digests[folder.digest] = found
    return found


def _read(place: ContentLocation) -> bytes | None:
    try:
        fd = place.donor.tree.open_file(place.path)
    except OSError:
        return None
    with Descriptor(fd):
        return os.pread(fd, place.size, place.offset)
