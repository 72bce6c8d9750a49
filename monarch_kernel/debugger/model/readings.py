"""Readings of a value that a rank reports: a `Leaf` for each part without parts, and a `Reading` for the whole.

Ranks send only these. They hold digests and figures, never the contents of an array. Pure, standard library only.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

#: The size of a digest in bytes: two different contents have the same digest with a probability of 2**-128.
DIGEST = 16


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures about the elements of an array.

    NaN and infinite elements are counted, but excluded from the other figures.

    Attributes:
        norm: the Euclidean norm; None if it was not computed (integers).
        low: the smallest element; None if there is none, or no order.
        high: the largest element, likewise.
        nans: the number of NaN elements.
        infs: the number of infinite elements.
    """

    norm: float | None = None
    low: float | None = None
    high: float | None = None
    nans: int = 0
    infs: int = 0

    def text(self) -> str:
        """Format the figures in one line: `norm 12.4, min -3, max 4.1, NaN 2`."""
        parts: list[str] = []
        if self.norm is not None:
            parts.append(f"norm {figure(self.norm)}")
        if self.low is not None and self.high is not None:
            parts += [f"min {figure(self.low)}", f"max {figure(self.high)}"]
        if self.nans:
            parts.append(f"NaN {self.nans:,}")
        if self.infs:
            parts.append(f"Inf {self.infs:,}")
        return ", ".join(parts)

    @staticmethod
    def over(many: Iterable[Stats]) -> Stats:
        """Combine the figures of several arrays."""
        found = list(many)
        norms = [each.norm for each in found if each.norm is not None]
        lows = [each.low for each in found if each.low is not None]
        highs = [each.high for each in found if each.high is not None]
        return Stats(
            math.hypot(*norms) if norms else None,
            min(lows, default=None),
            max(highs, default=None),
            sum(each.nans for each in found),
            sum(each.infs for each in found),
        )


@dataclass(frozen=True, slots=True)
class Leaf:
    """A part of a value.

    Two parts are equal if their kinds, facts and contents are equal. The memory layout of an array does not count, nor
    does its device among several of one kind.

    Attributes:
        path: the path from the value to the part: `.weight`, `['a'][0]`, a parameter's name; "" for the value itself.
        kind: `tensor`, `array`, `number`, `text`, `module`, `unread` (it could not be read; `text` gives the reason).
        facts: facts that must be equal for contents to be comparable: `float32 [3, 4]`, or the type.
        text: the displayed text of the part, of bounded length.
        content: the digest of the contents.
        size: the number of elements of an array.
        shape: the shape of an array.
        number: the value, if it is one number.
        stats: figures of an array.
        part: the shard that the rank holds. Different shards cannot be compared.
    """

    path: str
    kind: str
    facts: str
    text: str
    content: bytes
    size: int = 0
    shape: tuple[int, ...] = ()
    number: float | None = None
    stats: Stats | None = None
    part: str = ""

    @property
    def is_array(self) -> bool:
        """Whether it has elements that can be compared one by one."""
        return self.kind in ("tensor", "array")

    @property
    def digest(self) -> bytes:
        """A key that is equal for equal parts."""
        return digest_of(self.kind.encode(), self.facts.encode(), self.part.encode(), self.content)


@dataclass(frozen=True, slots=True)
class Reading:
    """A value on one rank, reduced.

    Attributes:
        digest: equal on ranks with equal values.
        text: the value in one line.
        leaves: the number of its parts.
        arrays: how many of them are arrays.
        elements: the total number of elements of these arrays.
        stats: the figures of all arrays together; None if there are none.
        number: the value, if it is one number.
        part: the shard that the rank holds; "" if the value is not sharded.
        unread: parts that could not be read, and why.
        sampled: the parts that were left out, as a sentence; "" if all were read.
        where: where the expression was evaluated, if that may differ between ranks; else "".
        seconds: how long it took to evaluate and read the value.
    """

    digest: bytes
    text: str
    leaves: int
    arrays: int = 0
    elements: int = 0
    stats: Stats | None = None
    number: float | None = None
    part: str = ""
    unread: tuple[str, ...] = ()
    sampled: str = ""
    where: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Contrast:
    """How the elements of one array differ between two ranks, in the blocks that were compared.

    Attributes:
        index: the first element that differs, in each dimension; None if none does.
        ours: that element on the queried rank, as text.
        theirs: that element on the reference rank, as text.
        count: the number of elements that differ.
        most: the largest absolute difference of finite elements; None if there is no such pair.
        relative: the largest difference relative to the larger of the two magnitudes, likewise.
        compared: the number of elements that were compared.
    """

    index: tuple[int, ...] | None = None
    ours: str = ""
    theirs: str = ""
    count: int = 0
    most: float | None = None
    relative: float | None = None
    compared: int = 0


def digest_of(*parts: bytes) -> bytes:
    """Compute a digest of parts in their order. The boundaries between parts count."""
    made = hashlib.blake2b(digest_size=DIGEST)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()


def root_digest(leaves: Iterable[Leaf]) -> bytes:
    """Compute the digest of a whole. The order of its parts does not count, like that of a dictionary's keys."""
    return digest_of(*sorted(digest_of(leaf.path.encode(), leaf.digest) for leaf in leaves))


def figure(number: float) -> str:
    """Format a number with up to six digits: `0.5`, `1e-08`, `12345.7`."""
    return f"{number:.6g}"


def short(text: str, limit: int = 200) -> str:
    """Return `text` as one line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def shown(item: object) -> str:
    """Format an element of an array."""
    return figure(item) if isinstance(item, float) and math.isfinite(item) else str(item)


def shown_pair(one: object, other: object) -> tuple[str, str]:
    """Format two elements that differ, with enough digits to distinguish them."""
    texts = shown(one), shown(other)
    return texts if texts[0] != texts[1] else (repr(one), repr(other))
