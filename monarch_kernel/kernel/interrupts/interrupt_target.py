"""What an interrupt acts on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class InterruptTarget(Protocol):
    """Something that runs on ranks and can be interrupted. The relay calls all methods on its thread."""

    def describe(self) -> str:
        """Its name in a sentence: ``mesh 'trainers'``."""
        ...

    def interrupt(self) -> object:
        """Interrupt what runs there, without waiting."""
        ...

    def unanswered(self) -> Iterable[int]:
        """The ranks that have not stopped since ``interrupt()``."""
        ...

    def kill(self, ranks: Sequence[int]) -> object:
        """Kill the processes of these ranks; raise if that fails."""
        ...
