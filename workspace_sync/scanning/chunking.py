"""Cut large files into chunks.

A new file is cut into chunks of one size. When a file has changed, the cuts that it had are found again by the bytes
that stood behind them, so an insertion or a deletion moves cuts and leaves all other chunks as they were. That sends as
little as cuts that follow from the content do (FastCDC), at the speed of reading; what it cannot find are pieces that
this client has not seen before. ``python -m bench.chunking`` compares; see docs/sync.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

#: The size of a chunk (bytes). A file that is not larger is one piece.
CHUNK = 1 << 20
#: How many bytes behind a cut are remembered.
ANCHOR = 32
#: How far beyond the end of a chunk the next cut is looked for (bytes).
_BEYOND = CHUNK // 4
#: After so many chunks without a cut that was found again, only one in so many is searched.
_PATIENCE = 64
_SELDOM = 16
#: How many of the next chunks are looked for where the first one is missed.
_FARTHER = 64


class Cuts(NamedTuple):
    """Chunks of a file.

    Attributes:
        sizes: of its chunks (bytes).
        anchors: the first ``ANCHOR`` bytes of each chunk, one behind the other; the last is padded with zeros.
    """

    sizes: tuple[int, ...]
    anchors: bytes

    def anchor(self, number: int) -> bytes:
        """The bytes at the start of a chunk."""
        return self.anchors[number * ANCHOR : (number + 1) * ANCHOR]


def even(size: int) -> tuple[int, ...]:
    """The sizes of the chunks of a file that was not seen before."""
    last = size % CHUNK
    return (CHUNK,) * (size // CHUNK) + ((last,) if last else ())


def again(known: Cuts, size: int, read: Callable[[int, int], bytes]) -> tuple[int, ...]:
    """The sizes of the chunks of a file that was cut before.

    Args:
        known: how it was cut.
        size: its size now (bytes).
        read: gives the bytes at (offset, size); fewer at the end of the file.
    """
    if size == sum(known.sizes):
        return known.sizes  # what was changed in place, as most files of one size are, has its cuts where they were
    starts: list[int] = []
    position = number = 0  # where it is believed that this chunk starts now
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
                    starts.append(position)  # what was inserted
                number, position = hit
                continue
        starts.append(position)
        # What follows the start of the last one is cut anew, so that a file that grows keeps no short chunks.
        position = position + known.sizes[number] if number < last else size
        number += 1
    if position < size:
        starts.append(position)
    sizes = _sizes(starts, size)
    # Many small pieces are not worth keeping, and neither are cuts of another content.
    return sizes if found and len(sizes) <= 2 * (size // CHUNK) + 16 else even(size)


def _search(
    known: Cuts, starts: list[int], position: int, number: int, misses: int, read: Callable[[int, int], bytes]
) -> tuple[int, int] | None:
    """The first chunk that starts near a position, as (number, position)."""
    low = starts[-1] + 1 if starts else 0  # after a deletion it starts earlier
    window = read(low, position - low + CHUNK + _BEYOND)
    # What was replaced is mostly as long as it was; what was inserted leaves the next chunk, and what was deleted one
    # that is farther on.
    numbers = range(number, number + _FARTHER) if misses <= 2 else (number - misses + 1, number, number + 1)
    best: tuple[int, int] | None = None
    for each in numbers:
        if best is not None and each > number + 1:
            break
        anchor = known.anchor(each)
        if len(anchor) < ANCHOR or len(set(anchor)) < ANCHOR // 4:
            continue  # such bytes are everywhere
        at = window.find(anchor) if best is None else window.find(anchor, 0, best[1])
        if at >= 0:
            best = each, at
    return None if best is None else (best[0], low + best[1])


def _sizes(starts: list[int], size: int) -> tuple[int, ...]:
    """The sizes of the pieces between some positions, none larger than a chunk."""
    sizes: list[int] = []
    for start, end in zip(starts, [*starts[1:], size], strict=True):
        sizes += even(min(end, size) - start)
    return tuple(sizes)
