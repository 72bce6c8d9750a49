"""Compare the readings of many ranks: the distinct values, the ranks that have them, and where they differ. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from monarch_kernel.debugger.model.readings import Contrast, Leaf, Reading
from monarch_kernel.debugger.rank.values.blocks import BLOCK_BYTES, blocks_of

#: How many groups of ranks are compared part by part. If there are more, the smallest ones are compared.
MOST_COMPARED = 8
#: A number is suspicious if its distance from the median is this many times the median distance.
OUTLIER = 6.0
#: How many bytes of arrays may be transferred to compare elements.
BUDGET = 8 << 20


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """The ranks that have one value.

    Attributes:
        ranks: the ranks, sorted.
        reading: the reading of the first of them.
    """

    ranks: tuple[int, ...]
    reading: Reading


@dataclass(frozen=True, slots=True)
class Difference:
    """A part of a value that differs between ranks.

    Attributes:
        path: the part.
        ranks: the ranks that differ.
        against: the ranks that they differ from: the largest group.
        ours: the part on `ranks`; None if these ranks have no such part.
        theirs: the part on `against`; None likewise.
        contrast: how their elements differ; None if they have none, have different types, or exceed the budget.
        blocks: how many blocks of elements differ.
        compared: how many of these were compared; if not all, the figures of `contrast` are lower bounds.
    """

    path: str
    ranks: tuple[int, ...]
    against: tuple[int, ...]
    ours: Leaf | None
    theirs: Leaf | None
    contrast: Contrast | None = None
    blocks: int = 0
    compared: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all differing elements were compared."""
        return self.compared == self.blocks

    @property
    def has_elements(self) -> bool:
        """Whether both sides have arrays of the same type and shape."""
        ours, theirs = self.ours, self.theirs
        if ours is None or theirs is None or not ours.is_array or ours.content == theirs.content:
            return False
        return (ours.kind, ours.shape, _element(ours), ours.part) == (
            theirs.kind,
            theirs.shape,
            _element(theirs),
            theirs.part,
        )


def group(readings: Mapping[int, Reading]) -> list[ValueGroup]:
    """Group ranks by their values, the smallest group first; among groups of equal size, the most suspicious first.

    NaN and infinite elements are the most suspicious, then values far from the median.
    """
    ranks: dict[tuple[str, bytes], list[int]] = {}
    for rank in sorted(readings):
        ranks.setdefault((readings[rank].part, readings[rank].digest), []).append(rank)
    groups = [ValueGroup(tuple(each), readings[each[0]]) for each in ranks.values()]
    middle, spread = _middle([_size_of(readings[rank]) for rank in sorted(readings)])

    def order(each: ValueGroup) -> tuple[int, bool, float, int]:
        good = not _bad_elements(each.reading)
        size = _size_of(each.reading)
        away = abs(size - middle) / spread if size is not None and middle is not None else 0.0
        return len(each.ranks), good, -away if away > OUTLIER else 0.0, each.ranks[0]

    return sorted(groups, key=order)


def _bad_elements(reading: Reading) -> bool:
    stats = reading.stats
    number = reading.number
    return (stats is not None and bool(stats.nans or stats.infs)) or (number is not None and not math.isfinite(number))


def _size_of(reading: Reading) -> float | None:
    """Return the number that best distinguishes values of the same kind at a glance."""
    if reading.number is not None:
        return reading.number if math.isfinite(reading.number) else None
    stats = reading.stats
    norm = stats.norm if stats is not None else None
    return norm if norm is not None and math.isfinite(norm) else None


def _middle(numbers: Sequence[float | None]) -> tuple[float | None, float]:
    known = [number for number in numbers if number is not None]
    if not known:
        return None, 1.0
    middle = statistics.median(known)
    return middle, statistics.median(abs(number - middle) for number in known) or 1.0


def families(groups: Sequence[ValueGroup]) -> list[list[ValueGroup]]:
    """Return the groups that can be compared with each other: those that hold the same part of a sharded value.

    The other groups of a family are compared with its last one. This is the largest group; if there are several, a
    group without NaN and infinite elements and with the lowest rank. Families of one group are left out.
    """
    found: dict[str, list[ValueGroup]] = {}
    for each in groups:
        found.setdefault(each.reading.part, []).append(each)
    return [_with_reference(family) for family in found.values() if len(family) > 1]


def _with_reference(family: list[ValueGroup]) -> list[ValueGroup]:
    reference = max(family, key=lambda each: (len(each.ranks), not _bad_elements(each.reading), -each.ranks[0]))
    others = [each for each in family if each is not reference]
    return [*others[: MOST_COMPARED - 1], reference]


def differences(family: Sequence[ValueGroup], leaves: Mapping[int, Sequence[Leaf]]) -> list[Difference]:
    """Return the parts in which a family's groups differ from its last one.

    Args:
        leaves: the parts on the first rank of each group; groups without an entry are not compared.
    """
    reference = family[-1]
    theirs = _by_path(leaves.get(reference.ranks[0], ()))
    others = [(each, _by_path(leaves[each.ranks[0]])) for each in family[:-1] if each.ranks[0] in leaves]
    if not theirs or not others:
        return []
    paths = dict.fromkeys(theirs)
    for _, ours in others:
        paths.update(dict.fromkeys(ours))
    found: list[Difference] = []
    for path in paths:
        expected = theirs.get(path)
        alike: dict[bytes | None, tuple[list[int], Leaf | None]] = {}
        agree = list(reference.ranks)
        for each, ours in others:
            leaf = ours.get(path)
            digest = leaf.digest if leaf is not None else None
            if digest == (expected.digest if expected is not None else None):
                agree += each.ranks
            else:
                # The first group comes first, because the elements are requested from its first rank.
                alike.setdefault(digest, ([], leaf))[0].extend(each.ranks)
        found += [
            Difference(path, tuple(ranks), tuple(sorted(agree)), leaf, expected) for ranks, leaf in alike.values()
        ]
    return found


def _by_path(leaves: Iterable[Leaf]) -> dict[str, Leaf]:
    return {leaf.path: leaf for leaf in leaves}


def _element(leaf: Leaf) -> str:
    """Return the element type in an array's facts."""
    return leaf.facts.split(" [", 1)[0] if " [" in leaf.facts else leaf.facts


def differing_blocks(ours: bytes, theirs: bytes) -> list[int]:
    """Return the numbers of the blocks whose digests differ, for two arrays of the same shape."""
    pairs = zip(blocks_of(ours), blocks_of(theirs), strict=True)
    return [at for at, (one, other) in enumerate(pairs) if one != other]


def chosen_blocks(differing: Sequence[Sequence[int]], sizes: Sequence[int], budget: int = BUDGET) -> list[list[int]]:
    """Choose the blocks to compare within a budget: the first that differs of every array, then others, evenly spread.

    Args:
        differing: the differing blocks of each array, in order.
        sizes: the bytes of a block of each array.
        budget: the total number of bytes.
    """
    counts = [0] * len(differing)
    left = budget
    while True:
        # Add one to each array in turn, so that no array takes another's share.
        more = [at for at, blocks in enumerate(differing) if counts[at] < len(blocks)]
        given = 0
        for at in more:
            if sizes[at] <= left:
                counts[at] += 1
                left -= sizes[at]
                given += 1
        if not given:
            break
    return [_spread(blocks, count) for blocks, count in zip(differing, counts, strict=True)]


def _spread(blocks: Sequence[int], count: int) -> list[int]:
    if count <= 1 or count >= len(blocks):
        return list(blocks[:count])
    step = (len(blocks) - 1) / (count - 1)
    return [blocks[round(at * step)] for at in range(count)]


def block_bytes(leaf: Leaf) -> int:
    """Return the maximum number of bytes in a block of an array."""
    return min(BLOCK_BYTES, max(1, leaf.size) * 16)
