"""Lay out the content of a manifest in segments: blocks of some MiB, each with pieces of several files.

Small files come first, and files of one folder are adjacent, so that one block serves many of the files that a program
imports. A later manifest adds a segment with the new content. Existing pieces never move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

import msgspec

from workspace_sync.model.manifest import FileEntry

# Choose the source of each block for each host: the client for one host, other hosts for the rest. No I/O, no clock.
#
# Unlike in a sync, hosts request blocks: when a program on the host reads them.

#: The number of hosts that read from one holder of a block in parallel.
READERS = 2
#: The time after which other hosts stop waiting for a host to receive a block (seconds).
SLOW = 2.0

#: The client as the source.
CLIENT = -1


@dataclass(slots=True)
class _Block:
    holders: dict[int, int] = field(default_factory=dict[int, int])  # host -> number of hosts that read from it now
    sent: float | None = None  # when the client last sent it to a host that has not received it yet
    to: set[int] = field(default_factory=set[int])  # the hosts to which the client is sending it


class BlockRoutes:
    """Chooses the sources of blocks for hosts.

    A block is named by any hashable value, a host by its rank.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._dead: set[int] = set()

    def ask(self, host: int, block: tuple[int, int], now: float, avoid: frozenset[int] = frozenset()) -> int | None:
        """Choose the source of a block for a host: another host, or ``CLIENT``; None: ask again after the next ``got``.

        Args:
            host: the requesting host.
            block: the requested block.
            now: the time (seconds).
            avoid: hosts from which it could not read the block.
        """
        state = self._blocks.setdefault(block, _Block())
        holders = [h for h in state.holders if h != host and h not in self._dead and h not in avoid]
        free = [h for h in holders if state.holders[h] < READERS]
        if free:
            chosen = min(free, key=lambda h: (state.holders[h], h))
            state.holders[chosen] += 1
            return chosen
        if not holders and (state.sent is None or not state.to - self._dead or now - state.sent > SLOW):
            state.sent = now
            state.to.add(host)
            return CLIENT
        return None

    def got(self, host: int, block: tuple[int, int], source: int) -> None:
        """Record that a host has received a block, and now serves it to others."""
        self._ended(host, block, source)
        self._blocks.setdefault(block, _Block()).holders.setdefault(host, 0)

    def failed(self, host: int, block: tuple[int, int], source: int) -> None:
        """Record that a host could not read a block from another host or the client."""
        self._ended(host, block, source)

    def _ended(self, host: int, block: tuple[int, int], source: int) -> None:
        state = self._blocks.setdefault(block, _Block())
        if source == CLIENT:
            state.to.discard(host)
            if not state.to:
                state.sent = None
        elif state.holders.get(source, 0) > 0:
            state.holders[source] -= 1

    def forget(self, block: tuple[int, int]) -> None:
        """Forget the holders of a block whose content is incomplete: the next host gets it from the client."""
        self._blocks.pop(block, None)

    def dead(self, host: int) -> None:
        """Record that a host has ended or cannot be reached, and serves no blocks any more."""
        self._dead.add(host)


#: A block is closed when it reaches this size (bytes); a piece is never split.
BLOCK_SIZE = 4 << 20
#: Smaller files count as code, which is prefetched (bytes).
SMALL = 1 << 20
#: The maximum amount of prefetched content (bytes).
PREFILL = 256 << 20
_CODE = (b".py", b".pyc", b".pyi", b".so", b".json", b".toml", b".yaml", b".yml", b".txt", b".cfg", b".ini", b".sh")


class PackedPiece(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A run of bytes with a digest."""

    digest: bytes
    size: int


class PackedBlock(msgspec.Struct, array_like=True, frozen=True):
    """Unit of transfer: adjacent pieces of a segment."""

    offset: int
    size: int
    pieces: tuple[PackedPiece, ...]


class PackedSegment(msgspec.Struct, array_like=True):
    """A sequence of blocks, laid out like a file.

    Attributes:
        number: 0, 1, 2 ...
        blocks: its blocks, adjacent.
        ahead: the number of blocks at its start that are prefetched.
    """

    number: int
    blocks: tuple[PackedBlock, ...]
    ahead: int

    @property
    def size(self) -> int:
        """The size of the segment (bytes)."""
        return self.blocks[-1].offset + self.blocks[-1].size if self.blocks else 0


def lay_out(files: Iterable[tuple[bytes, FileEntry]], number: int, have: Set[bytes]) -> PackedSegment:
    """Lay out a segment with the pieces of files that no earlier segment contains.

    Args:
        files: the files with their paths; unchanged ones may be omitted.
        number: of the segment.
        have: the digests of the pieces in earlier segments.
    """
    code: list[tuple[bytes, FileEntry]] = []
    small: list[tuple[bytes, FileEntry]] = []
    large: list[tuple[bytes, FileEntry]] = []
    for path, entry in sorted(files, key=lambda item: item[0]):
        if entry.size >= SMALL:
            large.append((path, entry))
        elif path.endswith(_CODE):
            code.append((path, entry))
        else:
            small.append((path, entry))
    taken = set(have)
    first = list(_blocks(_new_pieces((entry for _, entry in code), taken), 0))
    end = first[-1].offset + first[-1].size if first else 0
    blocks = [*first, *_blocks(_new_pieces((entry for _, entry in (*small, *large)), taken), end)]
    ahead = sum(1 for block in first if block.offset + block.size <= PREFILL)
    return PackedSegment(number, tuple(blocks), ahead)


def _new_pieces(entries: Iterable[FileEntry], taken: set[bytes]) -> Iterator[PackedPiece]:
    for entry in entries:
        for digest, _offset, size in entry.pieces():
            if digest not in taken:
                taken.add(digest)
                yield PackedPiece(digest, size)


def _blocks(pieces: Iterable[PackedPiece], offset: int) -> Iterator[PackedBlock]:
    batch: list[PackedPiece] = []
    size = 0
    for piece in pieces:
        if batch and size + piece.size > BLOCK_SIZE:
            yield PackedBlock(offset, size, tuple(batch))
            offset += size
            batch, size = [], 0
        batch.append(piece)
        size += piece.size
    if batch:
        yield PackedBlock(offset, size, tuple(batch))
