"""Decide the effect of Ctrl-C or the stop button. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

#: A second press within this time after the first kills ranks that have not responded (seconds).
ESCALATION_WINDOW = 2.0
#: The time for ranks to respond (seconds). It prevents a double click from killing healthy ranks, or ranks that wait in
#: a collective and are about to be released.
ANSWER_GRACE = 1.0


class InterruptTarget(Protocol):
    """Work that runs on ranks and can be interrupted. The relay calls all methods on its own thread."""

    def describe(self) -> str:
        """Return the target's name within a sentence, such as ``mesh 'trainers'``."""
        ...

    def interrupt(self) -> object:
        """Interrupt the running work, without waiting."""
        ...

    def unanswered(self) -> Iterable[int]:
        """Return the ranks that have not stopped since ``interrupt()``."""
        ...

    def kill(self, ranks: Sequence[int]) -> object:
        """Kill the processes of these ranks. Raise if that fails."""
        ...


@dataclass(frozen=True)
class Forward:
    """Interrupt these targets, or the default targets if there are none."""

    cell: object
    targets: tuple[InterruptTarget, ...]


@dataclass(frozen=True)
class Escalate:
    """Kill the ranks that have not responded to the first press, but not before ``not_before``."""

    cell: object
    not_before: float


#: The value for a rank that has not answered an interrupt: what it runs is unknown.
SILENT = frozenset({"?"})


@dataclass(frozen=True)
class Interruption:
    """The effect of an interrupt of a mesh by a command.

    Attributes:
        at: the time (`time.monotonic()`).
        running: the endpoints that each rank ran; `SILENT` for a rank that did not answer.
        calls: for each rank, the numbers of this process's calls that it had not answered.
    """

    at: float
    running: Mapping[int, frozenset[str]]
    calls: Mapping[int, frozenset[int]]

    def may_escalate(self, now: float) -> bool:
        """Return whether another interrupt would count as a second one."""
        return now - self.at <= ESCALATION_WINDOW

    def unanswered(self, later: Interruption) -> list[int]:
        """Return the ranks that still run what this interrupt hit, given the result of a later interrupt."""
        return sorted(
            rank
            for rank, names in later.running.items()
            if (before := self.running.get(rank))
            and (names & before or SILENT in (names, before))
            # An endpoint has the same name in each call. A call with another number is different work.
            and (not self.calls.get(rank) or self.calls[rank] & later.calls.get(rank, frozenset()))
        )


class PressLogic:
    """Distinguishes first presses from second ones.

    Args:
        window: a press within this time after the first, for the same cell or for none, is a second press.
        grace: how long a rank may take to respond to the first press.
    """

    def __init__(self, window: float = ESCALATION_WINDOW, grace: float = ANSWER_GRACE) -> None:
        self.window = window
        self.grace = grace
        self._first: tuple[float, object] | None = None

    def press(
        self, now: float, cell: object, targets: tuple[InterruptTarget, ...] = (), idle: bool = False
    ) -> Forward | Escalate | None:
        """Decide what a press does.

        Args:
            now: the time of the press.
            cell: the cell that was running; the same object for all presses during it.
            targets: the active targets.
            idle: no cell was running. The press then applies to the cell that the first press ended, or to background
                work on ranks. Without either, it has no effect.
        """
        first = self._first
        if first is not None and now - first[0] <= self.window and (idle or first[1] is cell):
            self._first = None
            return Escalate(first[1], first[0] + self.grace)
        if idle and not targets:
            return None
        self._first = (now, cell)
        return Forward(cell, targets)
