"""Represent arrays of any library, on any device, as sequences of blocks.

A block is a run of elements in logical (row-major) order. All blocks except the last have the same length. Each has a
digest, so two ranks can find out which blocks differ without exchanging them. `Array` is the common base of tensors
(`tensors.TensorArray`), NumPy arrays (`arrays.NumpyArray`) and plain lists of numbers (`arrays.NumberArray`).
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from monarch_kernel.debugger.model.readings import DIGEST, Contrast, Leaf, Stats, digest_of

#: The maximum size of a block (bytes). It fits into a processor's cache together with its intermediate results.
BLOCK_BYTES = 1 << 18


class TimeLimitError(Exception):
    """Reading a value took longer than its time limit."""


class Deadline:
    """The time limit for reading. `check` is called between blocks."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        """Raise `TimeLimitError` once the time is over."""
        if time.monotonic() > self._end:
            raise TimeLimitError(f"reading it took longer than {self.seconds:g} s; set a longer timeout, or read less")


class Array(ABC):
    """An array on this rank.

    Attributes:
        shape: its dimensions.
        size: the number of its elements.
        itemsize: bytes per element.
        digests: the digests of its blocks, concatenated; empty before `read`.
        stats: figures about its elements, set by `read`.
    """

    kind = "array"

    def __init__(self, shape: Sequence[int], itemsize: int) -> None:
        self.shape = tuple(shape)
        self.itemsize = itemsize
        self.size = 1
        for length in self.shape:
            self.size *= length
        self.digests = b""
        self.stats: Stats | None = None

    @property
    def block(self) -> int:
        """The number of elements per block."""
        return BLOCK_BYTES // max(1, self.itemsize) or 1

    @abstractmethod
    def facts(self) -> str:
        """Return type and shape, such as `float32 [3, 4]`; equal on ranks whose arrays may be compared."""

    @abstractmethod
    def read(self, deadline: Deadline) -> None:
        """Traverse all elements once, to set `digests` and `stats`."""

    @abstractmethod
    def digest_now(self, block: int) -> bytes:
        """Compute the digest of a block as it is at this moment."""

    @abstractmethod
    def piece(self, start: int, count: int) -> bytes:
        """Return elements `start` to `start + count` in row-major order, as bytes of a contiguous array."""

    @abstractmethod
    def contrast(self, start: int, other: bytes) -> Contrast:
        """Compare the elements from `start` on with a `piece` of an equal array on another rank.

        `Contrast.index` is a single number: the position in row-major order.
        """

    @abstractmethod
    def sample(self, count: int) -> str:
        """Format the first `count` elements."""

    def leaf(self, path: str, deadline: Deadline, facts: str = "", part: str = "", note: str = "") -> Leaf:
        """Return the leaf of this array. Reads it if that has not been done."""
        if not self.digests:
            self.read(deadline)
        facts = facts or self.facts()
        said = self.sample(self.size) if 0 < self.size <= 6 else ""
        figures = self.stats.text() if self.stats is not None and self.size > 1 else ""
        more = ", ".join(part for part in (said, figures, note) if part)
        text = f"{facts}: {more}" if more else facts
        content = digest_of(self.digests, self.size.to_bytes(8, "little"))
        number = self.stats.low if self.size == 1 and self.stats is not None else None
        return Leaf(path, self.kind, facts, text, content, self.size, self.shape, number, self.stats, part)

    def contrasts(self, pieces: Sequence[tuple[int, bytes]]) -> Contrast:
        """Combine the differences from pieces of an array on another rank, each with its start position."""
        index: tuple[int, ...] | None = None
        ours = theirs = ""
        count = compared = 0
        most: float | None = None
        relative: float | None = None
        for start, other in pieces:
            found = self.contrast(start, other)
            if index is None and found.index is not None:
                index, ours, theirs = unravel(found.index[0], self.shape), found.ours, found.theirs
            count += found.count
            compared += found.compared
            most = _larger(most, found.most)
            relative = _larger(relative, found.relative)
        return Contrast(index, ours, theirs, count, most, relative, compared)


def is_steady(array: Array, blocks: Iterable[int]) -> bool:
    """Return whether blocks are unchanged since the array was read."""
    known = blocks_of(array.digests)
    return all(array.digest_now(block) == known[block] for block in blocks)


def blocks_of(digests: bytes) -> list[bytes]:
    """Split concatenated digests into those of single blocks."""
    return [digests[at : at + DIGEST] for at in range(0, len(digests), DIGEST)]


def digest_of_block(content: bytes | memoryview) -> bytes:
    """Compute the digest of the bytes of a block."""
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


def unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Convert a position in row-major order to the index of the element."""
    index: list[int] = []
    for length in reversed(shape):
        position, at = divmod(position, length)
        index.append(at)
    return tuple(reversed(index))


def _larger(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
