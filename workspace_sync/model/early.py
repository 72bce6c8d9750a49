"""Content that a first sync sends while it is still being scanned: before there is a manifest."""

from __future__ import annotations

import msgspec


class EarlyFile(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A file, or some chunks of one, as they were read. What the manifest says of it later counts.

    Attributes:
        path: in the tree.
        size: of the file (bytes).
        mode: its permissions.
        mtime: its modification time (ns since the epoch).
        offset: where in it the first of these pieces begins (bytes).
        digests: of the pieces, one behind the other.
        sizes: of these (bytes).
    """

    path: bytes
    size: int
    mode: int
    mtime: int
    offset: int
    digests: tuple[bytes, ...]
    sizes: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether it is all of the file."""
        return self.offset == 0 and sum(self.sizes) == self.size
