"""Cut large files into chunks.

A new file is cut into chunks of equal size. When a file has changed, its previous cuts are found again by the bytes
that followed them. An insertion or a deletion thus moves cuts, and leaves all other chunks unchanged. This sends as
little as content-defined cuts (FastCDC), at the speed of reading, but cannot find pieces that this client has not seen
before. ``python -m bench.chunking`` compares both; see docs/sync.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

#: The size of a chunk (bytes). A file that is not larger is a single piece.
CHUNK = 1 << 20
#: The number of bytes after a cut that are remembered.
ANCHOR = 32
#: The distance beyond the end of a chunk within which the next cut is searched (bytes).
_BEYOND = CHUNK // 4
#: After this many chunks without a cut that was found again, only one in this many is searched.
_PATIENCE = 64
_SELDOM = 16
#: The number of following chunks that are searched if the first one is not found.
_FARTHER = 64


class Cuts(NamedTuple):
    """The chunks of a file.

    Attributes:
        sizes: of its chunks (bytes).
        anchors: the first ``ANCHOR`` bytes of each chunk, concatenated; the last is padded with zeros.
    """

    sizes: tuple[int, ...]
    anchors: bytes

    def anchor(self, number: int) -> bytes:
        """Return the remembered bytes at the start of a chunk."""
        return self.anchors[number * ANCHOR : (number + 1) * ANCHOR]


def even(size: int) -> tuple[int, ...]:
    """Compute the sizes of the chunks of a file that was not seen before."""
    last = size % CHUNK
    return (CHUNK,) * (size // CHUNK) + ((last,) if last else ())


def again(known: Cuts, size: int, read: Callable[[int, int], bytes]) -> tuple[int, ...]:
    """Compute the sizes of the chunks of a file that was cut before.

    Args:
        known: the previous cuts.
        size: its size now (bytes).
        read: returns the bytes at (offset, size); fewer at the end of the file.
    """
    if size == sum(known.sizes):
        return known.sizes  # most files of unchanged size were changed in place, and keep their cuts
    starts: list[int] = []
    position = number = 0  # the presumed start of this chunk
    found = 0
    misses = 0
    last = len(known.sizes) - 1
    while position < size and number <= last:
        if read(position, ANCHOR) == known.anchor(number):
            found += 1
            misses = 0
        else:
            misses += 1
            searched = misses <= _PATIENCE or misses % _SELDOM == 0
            hit = _search(known, starts, position, number, misses, read) if searched else None
            if hit is not None:
                if hit[1] > position:
                    starts.append(position)  # inserted data
                number, position = hit
                continue
        starts.append(position)
        # Everything after the start of the last chunk is cut anew, so that a growing file has no short chunks in it.
        position = position + known.sizes[number] if number < last else size
        number += 1
    if position < size:
        starts.append(position)
    sizes = _sizes(starts, size)
    # Many small pieces are not worth keeping, and neither are cuts of different content.
    return sizes if found and len(sizes) <= 2 * (size // CHUNK) + 16 else even(size)


def _search(
    known: Cuts, starts: list[int], position: int, number: int, misses: int, read: Callable[[int, int], bytes]
) -> tuple[int, int] | None:
    """Find the first known chunk that starts near a position; return (number, position)."""
    low = starts[-1] + 1 if starts else 0  # after a deletion it starts earlier
    window = read(low, position - low + CHUNK + _BEYOND)
    # A replacement usually keeps the length; after an insertion the next chunk follows, and after a deletion a later
    # one.
    numbers = range(number, number + _FARTHER) if misses <= 2 else (number - misses + 1, number, number + 1)
    best: tuple[int, int] | None = None
    for each in numbers:
        if best is not None and each > number + 1:
            break
        anchor = known.anchor(each)
        if len(anchor) < ANCHOR or len(set(anchor)) < ANCHOR // 4:
            continue  # such bytes occur everywhere
        at = window.find(anchor) if best is None else window.find(anchor, 0, best[1])
        if at >= 0:
            best = each, at
    return None if best is None else (best[0], low + best[1])


def _sizes(starts: list[int], size: int) -> tuple[int, ...]:
    """Return the sizes of the pieces between some positions, none larger than a chunk."""
    sizes: list[int] = []
    for start, end in zip(starts, [*starts[1:], size], strict=True):
        sizes += even(min(end, size) - start)
    return tuple(sizes)
