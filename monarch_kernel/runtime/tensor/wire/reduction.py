"""`Reduction`: what a collective over values does, as ranks get it."""

from __future__ import annotations

from dataclasses import dataclass

#: What a program may ask for. "stack" keeps all values; the others make one of them.
REDUCTIONS = ("stack", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")


@dataclass(frozen=True, slots=True)
class Reduction:
    """A collective.

    Attributes:
        stream: the number of the stream: each has process groups of its own.
        groups: the ranks of the world that meet, each in one group, in the order of their values.
        kind: one of `REDUCTIONS`.
        scatter: whether each rank keeps only its part of the result: that at its position in the group.
        roots: the ranks that keep the result; None for all of them.
    """

    stream: int
    groups: tuple[tuple[int, ...], ...]
    kind: str
    scatter: bool
    roots: frozenset[int] | None = None
