"""What happens, in which order: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

#: The longest wait between two events (seconds).
PAUSE = 0.15


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        name: what happens.
        pause: how long nothing else happens before (seconds).
        dice: numbers from 0 to 1, which choose the victim and the details.
    """

    name: str
    pause: float
    dice: tuple[float, float, float]


def sequence(seed: int, weights: Mapping[str, int]) -> Iterator[Event]:
    """All events of a run: it does not depend on what they have come to."""
    source = random.Random(seed)
    names, shares = list(weights), list(weights.values())
    while True:
        name = source.choices(names, shares)[0]
        yield Event(name, source.uniform(0.0, PAUSE), (source.random(), source.random(), source.random()))


def pick(choices: Sequence[T], die: float) -> T:
    """The one that a number from 0 to 1 chooses."""
    return choices[int(die * len(choices))]
