"""Pack pieces of content into blocks, with a table of the pieces; reuse the memory of blocks.

A block is ``<u32 pieces>``, then ``<32 bytes digest><u64 size>`` for each piece, then their bytes in the same order. So
a host needs nothing but the block to store what is in it, and to pass it on.

Pieces are packed by the set of hosts that lack them: a host either wants all of a block or nothing of it.

A block that a first sync sends during the scan is the bytes of all pieces, then a list of ``EarlyFile`` (MessagePack),
then its length (``<u32>``). The list stands at the end, as it is known only when all have been read.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from workspace_sync.model.errors import TamperedError
from workspace_sync.model.manifest import DIGEST_SIZE, EarlyFile, ManifestDelta, digest_of

#: A piece: its digest, and its size (bytes).
Piece = tuple[bytes, int]

_COUNT = struct.Struct(">I")
_ROW = struct.Struct(f">{DIGEST_SIZE}sQ")

_LENGTH = struct.Struct(">I")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[EarlyFile]).decode

#: The size of blocks (bytes); a piece that is larger travels alone.
LARGEST = 4 << 20
#: Small payloads are cut into smaller blocks, so that hosts have something to exchange.
SMALLEST = 256 << 10
#: Blocks that a payload is cut into if that does not make them too small.
WANTED = 48


@dataclass(frozen=True, slots=True)
class ContentBlock:
    """Content of a block.

    Attributes:
        number: its name in one sync.
        pieces: in their order.
        size: its bytes, with the table.
        hosts: who lacks it.
    """

    number: int
    pieces: tuple[Piece, ...]
    size: int
    hosts: frozenset[str]


def pack(lacking: Mapping[str, Iterable[Piece]], first: int = 0) -> list[ContentBlock]:
    """Pack missing pieces into blocks, in their order.

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
    """The pieces by the set of hosts that lack them. Hosts mostly lack the same ones, and are then looked at once."""
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
    """The size of a block with these pieces."""
    return _COUNT.size + sum(_ROW.size + size for _, size in pieces)


def fill(view: memoryview, pieces: Sequence[Piece], read: Callable[[bytes, memoryview], None]) -> None:
    """Write a block.

    Args:
        view: as long as the block.
        pieces: what goes into it.
        read: writes the content of a digest into the view that it gets, which has its size.
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
    """The digest and the bytes of each piece of a block.

    Raises:
        TamperedError: this is no block.
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
    """Every piece (digest -> size) of the folders that some deltas bring, in an order that both sides agree on."""
    order: dict[bytes, int] = {}
    for change in changes:
        for folder in change.folders.values():
            for entry in folder.files.values():
                for digest, _, size in entry.pieces():
                    order[digest] = size
    return order


# -- blocks of a first sync ----------------------------------------------------------------------------


def finished(memory: memoryview, used: int, files: list[EarlyFile]) -> tuple[memoryview, bytes]:
    """Complete a block whose content is in place with the table that describes it."""
    text = _encode(files)
    end = text + _LENGTH.pack(len(text))
    block = memory[: used + len(end)]
    block[used:] = end
    return block, end


def files_in(block: memoryview) -> tuple[list[tuple[EarlyFile, memoryview]], bytes]:
    """The files of a block, each with the bytes of its pieces, and the end of the block.

    Raises:
        TamperedError: this is no such block.
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
    """Write a block again; return the file that has changed, if there is one.

    Args:
        block: as long as it was.
        end: of the block.
        read: reads bytes of a path in the tree from an offset; whether they are all there.
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

#: How much memory that nothing uses is kept (bytes).
KEPT_FREE = 32 << 20
_SMALLEST = 64 << 10


class BlockPool:
    """Memory of one sync for its blocks. Any thread may use it.

    Fresh memory is cleared by the system page by page, which takes longer than to copy a block into it. What is in use
    when the pool goes is the system's again with its last reference: from the heap of several threads it would not be,
    as freed blocks lie between what stays, and processes keep growing.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """Memory of a size (bytes), with any content."""
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
            pass  # a kernel without them
        return memoryview(memory)[:size]

    def give(self, memory: memoryview) -> None:
        """Give back memory from ``take`` that is no longer read or written."""
        whole = memory.obj
        if isinstance(whole, mmap.mmap):
            with self._lock:
                if self._size + len(whole) <= KEPT_FREE:
                    self._size += len(whole)
                    self._free.setdefault(len(whole), []).append(whole)
