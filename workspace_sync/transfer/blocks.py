"""Pack pieces of content into blocks, with a table of the pieces, and reuse the memory of blocks.

A block is ``<u32 pieces>``, then ``<32 bytes digest><u64 size>`` for each piece, then their bytes in the same order. A
host therefore needs only the block to store its content and to pass it on.

Pieces are grouped by the set of hosts that lack them: a host needs either a whole block or none of it.

A block that a first sync sends during the scan consists of the bytes of all pieces, a list of ``EarlyFile``
(MessagePack), and the length of the list (``<u32>``). The list is at the end, because it is known only when all pieces
have been read.
"""

from __future__ import annotations

import mmap
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from workspace_sync.model.errors import TamperedError
from workspace_sync.model.manifest import (
    DIGEST_SIZE,
    EarlyFile,
    Manifest,
    ManifestDelta,
    delta,
    digest_of,
    encode_delta,
)
from workspace_sync.scanning import read_first

#: A piece: its digest and size (bytes).
Piece = tuple[bytes, int]

_COUNT = struct.Struct(">I")
_ROW = struct.Struct(f">{DIGEST_SIZE}sQ")

_LENGTH = struct.Struct(">I")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[EarlyFile]).decode

#: The size of blocks (bytes). A larger piece gets a separate block.
LARGEST = 4 << 20
#: The minimum size of the blocks of a small payload, which is split so that hosts can exchange blocks (bytes).
SMALLEST = 256 << 10
#: The number of blocks that a payload is split into, unless they would be too small.
WANTED = 48


@dataclass(frozen=True, slots=True)
class ContentBlock:
    """Content of a block.

    Attributes:
        number: its number in a sync.
        pieces: its pieces, in order.
        size: its size, including the table (bytes).
        hosts: the hosts that lack it.
    """

    number: int
    pieces: tuple[Piece, ...]
    size: int
    hosts: frozenset[str]


def pack(lacking: Mapping[str, Iterable[Piece]], first: int = 0) -> list[ContentBlock]:
    """Pack missing pieces into blocks, preserving their order.

    Args:
        lacking: the pieces of each host.
        first: the number of the first block.
    """
    groups = _by_hosts(lacking)
    total = sum(size for pieces in groups.values() for _, size in pieces)
    limit = min(LARGEST, max(SMALLEST, total // WANTED))
    blocks: list[ContentBlock] = []
    for hosts, pieces in groups.items():
        inside: list[Piece] = []
        used = _COUNT.size
        for piece in pieces:
            row = _ROW.size + piece[1]
            if inside and used + row > limit:
                blocks.append(ContentBlock(first + len(blocks), tuple(inside), used, hosts))
                inside, used = [], _COUNT.size
            inside.append(piece)
            used += row
        if inside:
            blocks.append(ContentBlock(first + len(blocks), tuple(inside), used, hosts))
    return blocks


def _by_hosts(lacking: Mapping[str, Iterable[Piece]]) -> dict[frozenset[str], Iterable[Piece]]:
    """Group the pieces by the set of hosts that lack them.

    Usually all hosts lack the same pieces, which is checked first.
    """
    alike: dict[int, tuple[list[str], Sequence[Piece]]] = {}
    for host, pieces in lacking.items():
        pieces = pieces if isinstance(pieces, Sequence) else list(pieces)
        for names, known in alike.values():
            if known is pieces or known == pieces:
                names.append(host)
                break
        else:
            alike[len(alike)] = ([host], pieces)
    if len(alike) == 1:
        names, pieces = alike[0]
        return {frozenset(names): dict.fromkeys(pieces)}
    classes: dict[Piece, int] = {}
    for number, (_, pieces) in alike.items():
        for piece in pieces:
            classes[piece] = classes.get(piece, 0) | 1 << number
    groups: dict[int, list[Piece]] = {}
    for piece, mask in classes.items():
        groups.setdefault(mask, []).append(piece)
    return {
        frozenset(name for number, (names, _) in alike.items() if mask >> number & 1 for name in names): pieces
        for mask, pieces in groups.items()
    }


def block_bytes(pieces: Sequence[Piece]) -> int:
    """Compute the size of a block with these pieces (bytes)."""
    return _COUNT.size + sum(_ROW.size + size for _, size in pieces)


def fill(view: memoryview, pieces: Sequence[Piece], read: Callable[[bytes, memoryview], None]) -> None:
    """Write a block.

    Args:
        view: the memory to fill, as long as the block.
        pieces: the pieces of the block.
        read: writes the content of a digest into a view of its size.
    """
    _COUNT.pack_into(view, 0, len(pieces))
    at = _COUNT.size
    data = at + _ROW.size * len(pieces)
    for digest, size in pieces:
        _ROW.pack_into(view, at, digest, size)
        at += _ROW.size
        read(digest, view[data : data + size])
        data += size


def pieces_in(view: memoryview) -> list[tuple[bytes, memoryview]]:
    """Return the digest and the bytes of each piece of a block.

    Raises:
        TamperedError: it is not a valid block.
    """
    if len(view) < _COUNT.size:
        raise TamperedError("a block that arrived is too short")
    (count,) = _COUNT.unpack_from(view)
    data = _COUNT.size + _ROW.size * count
    if data > len(view):
        raise TamperedError("a block that arrived is shorter than its table")
    found: list[tuple[bytes, memoryview]] = []
    for digest, size in _ROW.iter_unpack(view[_COUNT.size : data]):
        if data + size > len(view):
            raise TamperedError("a block that arrived is shorter than its table says")
        found.append((digest, view[data : data + size]))
        data += size
    if data != len(view):
        raise TamperedError("a block that arrived is longer than its table says")
    return found


def piece_order(changes: Iterable[ManifestDelta]) -> dict[bytes, int]:
    """Return every piece (digest -> size) of the folders in some deltas, in an order that both sides agree on."""
    order: dict[bytes, int] = {}
    for change in changes:
        for folder in change.folders.values():
            for entry in folder.files.values():
                for digest, _, size in entry.pieces():
                    order[digest] = size
    return order


# -- blocks of a first sync ----------------------------------------------------------------------------


def finished(memory: memoryview, used: int, files: list[EarlyFile]) -> tuple[memoryview, bytes]:
    """Complete a block, whose content is in place, with the table that describes it."""
    text = _encode(files)
    end = text + _LENGTH.pack(len(text))
    block = memory[: used + len(end)]
    block[used:] = end
    return block, end


def files_in(block: memoryview) -> tuple[list[tuple[EarlyFile, memoryview]], bytes]:
    """Return the files of a block, each with the bytes of its pieces, and the end of the block.

    Raises:
        TamperedError: it is not a valid block of a first sync.
    """
    try:
        (length,) = _LENGTH.unpack(block[-_LENGTH.size :])
        end = bytes(block[len(block) - _LENGTH.size - length :])
        files = _decode(end[:length])
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError) as e:
        raise TamperedError(f"a received block has no valid table: {e}") from None
    found: list[tuple[EarlyFile, memoryview]] = []
    at = 0
    for file in files:
        size = sum(file.sizes)
        found.append((file, block[at : at + size]))
        at += size
    if at + len(end) != len(block):
        raise TamperedError("a block that arrived is not as long as it says")
    return found, end


def refill(block: memoryview, end: bytes, read: Callable[[bytes, int, memoryview], bool]) -> EarlyFile | None:
    """Fill a block again; return the file that has changed, if there is one.

    Args:
        block: the memory to fill, as long as the original block.
        end: the end of the block, which describes its content.
        read: reads bytes of a path in the tree from an offset; returns whether it has read all.
    """
    block[len(block) - len(end) :] = end
    at = 0
    for file in _decode(end[: -_LENGTH.size]):
        offset = file.offset
        for digest, size in zip(file.digests, file.sizes, strict=True):
            view = block[at : at + size]
            if not read(file.path, offset, view) or digest_of(view) != digest:
                return file
            at += size
            offset += size
    return None


# -- memory ---------------------------------------------------------------------------------------

#: The maximum amount of unused memory that is kept (bytes).
KEPT_FREE = 32 << 20
_SMALLEST = 64 << 10


class BlockPool:
    """Memory for the blocks of one sync. Thread-safe.

    The system clears new memory page by page, which takes longer than to copy a block into it. Memory that is in use
    when the pool is deleted returns to the system with its last reference. In a heap of several threads, freed blocks
    would lie between remaining data, and processes would keep growing.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """Return memory of this size (bytes), with arbitrary content."""
        room = max(_SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            free = self._free.get(room)
            if free:
                self._size -= room
                return memoryview(free.pop())[:size]
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            pass  # the kernel does not support them
        return memoryview(memory)[:size]

    def give(self, memory: memoryview) -> None:
        """Return memory from ``take`` that is no longer read or written."""
        whole = memory.obj
        if isinstance(whole, mmap.mmap):
            with self._lock:
                if self._size + len(whole) <= KEPT_FREE:
                    self._size += len(whole)
                    self._free.setdefault(len(whole), []).append(whole)


# Parts of a workspace (tree, environment) with their content, and the changes that hosts need to reach them.


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
