"""The target of an interrupt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class InterruptTarget(Protocol):
    """Work that runs on ranks and can be interrupted. The relay calls all methods on its own thread."""

    def describe(self) -> str:
        """The target's name within a sentence, such as ``mesh 'trainers'``."""
        ...

    def interrupt(self) -> object:
        """Interrupt the running work, without waiting."""
        ...

    def unanswered(self) -> Iterable[int]:
        """The ranks that have not stopped since ``interrupt()``."""
        ...

    def kill(self, ranks: Sequence[int]) -> object:
        """Kill the processes of these ranks; raise if that fails."""
        ...
