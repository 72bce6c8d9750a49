"""What crosses for pipes: where a rank is in its mesh, and what a generator is to give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PipePlace:
    """The mesh of a pipe.

    Attributes:
        ranks: its ranks in the engine's world.
        labels, sizes: its dimensions.
        name: what errors call the generator.
        max_messages: how many values its processes make ahead of their use.
    """

    ranks: tuple[int, ...]
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    name: str
    max_messages: int

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank of the world is in the mesh."""
        at, found = self.ranks.index(rank), dict[str, int]()
        for label, size in zip(reversed(self.labels), reversed(self.sizes)):
            at, found[label] = divmod(at, size)
        return {label: found[label] for label in self.labels}


@dataclass(frozen=True, slots=True)
class PipeYield:
    """What the shape function says that the next value is.

    Attributes:
        tree: how it is nested, as text: torch warns when it unpickles some of its own.
        leaves: for each part of it shape and dtype; None for what is no tensor.
    """

    tree: str
    leaves: tuple[tuple[tuple[int, ...], Any] | None, ...]
