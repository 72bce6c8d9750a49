"""`Watching`: what a watch for NaN and Inf is to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Watching:
    """A watch for NaN and Inf on all engines.

    Attributes:
        inf: whether an Inf counts.
        at_once: whether the operation raises itself, which costs a round trip each.
    """

    inf: bool
    at_once: bool
