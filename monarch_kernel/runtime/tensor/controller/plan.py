"""`Plan`: what a program's lines cost beyond its operations, counted where it happens."""

from __future__ import annotations

from dataclasses import dataclass, field

from monarch_kernel.runtime.tensor.controller import frames


@dataclass(slots=True)
class LineCost:
    """What one line of the program caused.

    Attributes:
        synchronisations: how often the controller waited for a value, by what asked for it.
        redistributions: how often the layout of a sharded tensor was changed, by what from and to.
        fallbacks: operations that had no rule for their layout and ran on the whole tensor, by name.
        sent: bytes of data from the controller to ranks.
        fetched: bytes of data from ranks to the controller.
        moved: bytes that ranks exchanged.
    """

    synchronisations: dict[str, int] = field(default_factory=dict[str, int])
    redistributions: dict[str, int] = field(default_factory=dict[str, int])
    fallbacks: dict[str, int] = field(default_factory=dict[str, int])
    sent: int = 0
    fetched: int = 0
    moved: int = 0


class Plan:
    """Costs by line of the program: ``(file, line, function)``.

    Attributes:
        lines: the costs.
        since: the number of the first record that counts.
    """

    def __init__(self) -> None:
        self.lines: dict[tuple[str, int, str], LineCost] = {}
        self.since = 0

    def line(self, place: tuple[str, int, str] | None = None) -> LineCost:
        """The costs of a line; by default the user's that runs now."""
        place = frames.here() if place is None else place
        cost = self.lines.get(place)
        if cost is None:
            cost = self.lines[place] = LineCost()
        return cost

    def synchronised(self, why: str) -> None:
        """The controller is about to wait for the ranks."""
        cost = self.line()
        cost.synchronisations[why] = cost.synchronisations.get(why, 0) + 1

    def clear(self) -> None:
        """Begin anew."""
        self.lines.clear()
