"""What an interrupt concerns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class InterruptTarget(Protocol):
    """Something running on ranks that a press concerns. All methods are called on the relay's thread."""

    def describe(self) -> str:
        """Name it in a sentence: ``mesh 'trainers'``."""
        ...

    def interrupt(self) -> object:
        """Ask what runs there to stop, without waiting for it."""
        ...

    def unanswered(self) -> Iterable[int]:
        """The ranks that have not stopped since ``interrupt()``."""
        ...

    def kill(self, ranks: Sequence[int]) -> object:
        """End these ranks' processes; raise if that cannot be done."""
        ...
