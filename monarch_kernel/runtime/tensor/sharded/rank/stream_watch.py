"""`StreamWatch`: tells where the stream of a rank is, while the stream itself may be stuck in a collective."""

from __future__ import annotations

from monarch_kernel.runtime.actor.context import current_rank
from monarch_kernel.runtime.actor.definition import Actor, endpoint
from monarch_kernel.runtime.tensor.rank.values import store_of


class StreamWatch(Actor):
    """Runs in each rank beside the workers of an engine."""

    __tool__ = True

    def __init__(self, engine: str) -> None:
        self._store = store_of(engine, current_rank().rank)

    @endpoint
    def at(self) -> int:
        """The number of the record that runs, or ran last, in the main stream."""
        return self._store.at()
