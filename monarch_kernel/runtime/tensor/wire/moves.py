"""`RankMoves`: which rank's value goes where, as ranks get it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RankMoves:
    """A move of a value between ranks of one world.

    Attributes:
        stream: the number of the stream: each has process groups of its own.
        ranks: all ranks that take part.
        routes: the sender of each receiver, itself included.
        size, dtype: of the value.
    """

    stream: int
    ranks: tuple[int, ...]
    routes: tuple[tuple[int, int], ...]
    size: tuple[int, ...]
    dtype: Any
