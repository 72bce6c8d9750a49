"""Parts of a workspace (tree, environment) with their content, and the changes that hosts need to reach them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from workspace_sync.model.manifest import Manifest, ManifestDelta, delta, encode_delta
from workspace_sync.scanning import read_first
from workspace_sync.transfer.blocks import Piece, piece_order


@dataclass(frozen=True)
class Part:
    """One part of a workspace: "tree" or "env".

    Attributes:
        name: of the part.
        manifest: its content.
        read: writes the content of a piece into a view; raises KeyError if there is no such piece.
        remembered: returns a manifest that hosts may have, by digest; None: unknown here.
    """

    name: str
    manifest: Manifest
    read: Callable[[bytes, memoryview], None]
    remembered: Callable[[bytes], Manifest | None]


@dataclass
class PartChange:
    """Change from one base to the new manifest of a part, computed once for all hosts with that base.

    Attributes:
        part: the part.
        delta: the difference of the manifests.
        data: the delta, encoded and compressed.
        blocks: numbers of the blocks that contain ``data``, if it is large.
    """

    part: Part
    delta: ManifestDelta
    data: bytes
    blocks: list[int] = field(default_factory=list[int])
    _order: dict[bytes, int] | None = None
    _new: list[Piece] | None = None
    _base: Manifest | None = None

    @property
    def order(self) -> dict[bytes, int]:
        """All pieces of the delta (``blocks.piece_order``)."""
        if self._order is None:
            self._order = piece_order([self.delta])
        return self._order

    def new_pieces(self, most: int) -> list[Piece] | None:
        """Return the pieces that the base does not have in the same folders; None if they exceed ``most`` bytes."""
        if self._new is None:
            before = set[bytes]()
            for path in self.delta.folders if self._base is not None else ():
                folder = self._base.folders.get(path) if self._base is not None else None
                for entry in folder.files.values() if folder is not None else ():
                    before.update(digest for digest, _, _ in entry.pieces())
            self._new = [piece for piece in self.order.items() if piece[0] not in before]
        return self._new if sum(size for _, size in self._new) <= most else None


class Changes:
    """The changes of all parts, by the current content of hosts.

    Args:
        parts: the synced parts.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = list(parts)
        self._known: dict[tuple[str, bytes], PartChange] = {}
        self._bases: dict[tuple[str, bytes], Manifest | None] = {}

    def of(self, part: Part, digests: Iterable[bytes]) -> PartChange:
        """Return the change for a host that has manifests of these digests, best first."""
        for digest in digests:
            base = self._base(part, digest)
            if base is not None:
                return self._change(part, digest, base)
        return self._change(part, b"", None)

    def read(self, digest: bytes, into: memoryview) -> None:
        """Read the content of a piece of any part."""
        read_first([each.read for each in self.parts], digest, into)

    def _base(self, part: Part, digest: bytes) -> Manifest | None:
        key = part.name, digest
        if key not in self._bases:
            same = digest == part.manifest.digest
            self._bases[key] = part.manifest if same else part.remembered(digest)
        return self._bases[key]

    def _change(self, part: Part, digest: bytes, base: Manifest | None) -> PartChange:
        change = self._known.get((part.name, digest))
        if change is None:
            made = delta(base, part.manifest)
            change = PartChange(part, made, zlib.compress(encode_delta(made), 1), _base=base)
            self._known[part.name, digest] = change
        return change
