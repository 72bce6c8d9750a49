"""Which press of Ctrl-C means what. Pure; time comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass

from monarch_kernel.kernel.interrupts.interrupt_target import InterruptTarget

#: A second press this soon after the first kills what did not answer (seconds).
ESCALATION_WINDOW = 2.0
#: Ranks get this long to answer, so that a double click does not kill healthy ones (seconds).
ANSWER_GRACE = 0.3


@dataclass(frozen=True)
class Forward:
    """Interrupt these targets; with none, the default ones."""

    cell: object
    targets: tuple[InterruptTarget, ...]


@dataclass(frozen=True)
class Escalate:
    """Kill what did not answer the first press, but not before ``not_before``."""

    cell: object
    not_before: float


class PressLogic:
    """Tells a first press from a second one.

    Args:
        window: a press this soon after the first, for the same cell or for none, is a second one.
        grace: how long after the first press a rank may take to answer.
    """

    def __init__(self, window: float = ESCALATION_WINDOW, grace: float = ANSWER_GRACE) -> None:
        self.window = window
        self.grace = grace
        self._first: tuple[float, object] | None = None

    def press(
        self, now: float, cell: object, targets: tuple[InterruptTarget, ...] = (), idle: bool = False
    ) -> Forward | Escalate | None:
        """What this press asks for.

        Args:
            now: when it came.
            cell: the cell that ran then: the same object for all presses during it.
            targets: what was active then.
            idle: no cell ran. Such a press concerns the cell that the first press ended, or whatever still
                runs on ranks in the background; with neither it means nothing.
        """
        first = self._first
        if first is not None and now - first[0] <= self.window and (idle or first[1] is cell):
            self._first = None
            return Escalate(first[1], first[0] + self.grace)
        if idle and not targets:
            return None
        self._first = (now, cell)
        return Forward(cell, targets)
