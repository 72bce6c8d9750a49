"""Count the costs of a program's lines beyond their operations: `Plan`."""

from __future__ import annotations

from dataclasses import dataclass, field

from monarch_kernel.runtime.tensor.controller import frames


@dataclass(slots=True)
class LineCost:
    """The costs of one line of the program.

    Attributes:
        synchronisations: how often the controller waited for a value, by cause.
        redistributions: how often the layout of a sharded tensor changed, by old and new layout.
        fallbacks: operations without a rule for their layout, which ran on the whole tensor, by name.
        sent: bytes of data from the controller to ranks.
        fetched: bytes of data from ranks to the controller.
        moved: bytes exchanged between ranks.
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
        """Return the costs of a line; by default the current user line."""
        place = frames.here() if place is None else place
        cost = self.lines.get(place)
        if cost is None:
            cost = self.lines[place] = LineCost()
        return cost

    def synchronised(self, why: str) -> None:
        """Count a wait of the controller for the ranks."""
        cost = self.line()
        cost.synchronisations[why] = cost.synchronisations.get(why, 0) + 1

    def clear(self) -> None:
        """Delete all counts."""
        self.lines.clear()
