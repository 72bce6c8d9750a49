"""The values of cells, as the notebook receives them from ranks."""

from __future__ import annotations

from typing import Any

import cloudpickle

from monarch_kernel.kernel.rank.executor import CellReply


class Unsent:
    """A placeholder for a value that stays on its rank, because it is too large or cannot be pickled."""

    def __init__(self, shown: str, why: str) -> None:
        self.shown = shown
        self.why = why

    def __repr__(self) -> str:
        return f"{self.shown}  (not sent: {self.why})"


def value_of(reply: CellReply) -> Any:
    """The value that a rank has sent, or a placeholder for it."""
    if reply.value is None:
        return Unsent(reply.shown, reply.unsent) if reply.unsent else None
    try:
        return cloudpickle.loads(reply.value)
    except Exception as error:  # its class may not be importable here
        return Unsent("a value", f"it cannot be rebuilt here ({type(error).__name__}: {error})")
