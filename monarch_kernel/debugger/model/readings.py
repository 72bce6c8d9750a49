"""What a rank reports about a value: a `Leaf` for each part that has no parts itself, and a `Reading` for the whole.

Only these are sent. They hold digests and figures, never the contents of an array. Pure, standard library only.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: Bytes of a digest: two different contents have the same digest with a probability of 2**-128.
DIGEST = 16


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures about the elements of an array. NaN and infinite elements are counted, and left out of the others.

    Attributes:
        norm: the Euclidean norm; None where it was not computed (integers).
        low: the smallest element; None where there is none, or no order.
        high: the largest element, likewise.
        nans: how many elements are NaN.
        infs: how many elements are infinite.
    """

    norm: float | None = None
    low: float | None = None
    high: float | None = None
    nans: int = 0
    infs: int = 0

    def text(self) -> str:
        """The figures in one line: `norm 12.4, min -3, max 4.1, NaN 2`."""
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
        """The figures of several arrays together."""
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

    Two parts are equal when kind, facts and content are; the memory layout of an array does not count, nor on which of
    several devices of one kind it is.

    Attributes:
        path: the way there from the value: `.weight`, `['a'][0]`, a parameter's name; "" for the value itself.
        kind: `tensor`, `array`, `number`, `text`, `module`, `unread` (it could not be read; `text` says why).
        facts: what must agree before contents can be compared: `float32 [3, 4]`, or the type.
        text: the part as it is shown, of bounded length.
        content: the digest of what it contains.
        size: how many elements an array has.
        shape: of an array.
        number: the value, where it is one number.
        stats: of an array.
        part: which shard of a whole this is; ranks that hold different shards cannot be compared.
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
        """Equal for equal parts."""
        return digest_of(self.kind.encode(), self.facts.encode(), self.part.encode(), self.content)


@dataclass(frozen=True, slots=True)
class Reading:
    """A value on one rank, reduced.

    Attributes:
        digest: equal on ranks with equal values.
        text: the value in one line.
        leaves: how many parts it has.
        arrays: how many of them are arrays.
        elements: how many elements those have in all.
        stats: of all arrays together; None if there are none.
        number: the value, where it is one number.
        part: which shard of a whole the rank holds; "" if it is not sharded.
        unread: parts that could not be read, and why.
        sampled: what was left out, as a sentence; "" if all was read.
        where: where the expression was evaluated, if that may differ from rank to rank; "" otherwise.
        seconds: how long it took to evaluate and read it.
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
        ours: that element on the rank asked, as text.
        theirs: that element on the rank it was compared with, as text.
        count: how many elements differ.
        most: the largest absolute difference of finite elements; None if there is no such pair.
        relative: the largest difference relative to the larger of the two magnitudes, likewise.
        compared: how many elements were compared.
    """

    index: tuple[int, ...] | None = None
    ours: str = ""
    theirs: str = ""
    count: int = 0
    most: float | None = None
    relative: float | None = None
    compared: int = 0


def digest_of(*parts: bytes) -> bytes:
    """A digest of parts in their order; where one part ends and the next begins counts."""
    made = hashlib.blake2b(digest_size=DIGEST)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()


def root_digest(leaves: Iterable[Leaf]) -> bytes:
    """The digest of a whole: the order of its parts does not count, just as that of a dictionary's keys."""
    return digest_of(*sorted(digest_of(leaf.path.encode(), leaf.digest) for leaf in leaves))


def figure(number: float) -> str:
    """A number with up to six digits: `0.5`, `1e-08`, `12345.7`."""
    return f"{number:.6g}"


def short(text: str, limit: int = 200) -> str:
    """`text` in one line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def shown(item: Any) -> str:
    """An element of an array as text."""
    return figure(item) if isinstance(item, float) and math.isfinite(item) else str(item)


def shown_pair(one: Any, other: Any) -> tuple[str, str]:
    """Format two elements that differ, with enough digits to distinguish them."""
    texts = shown(one), shown(other)
    return texts if texts[0] != texts[1] else (repr(one), repr(other))
