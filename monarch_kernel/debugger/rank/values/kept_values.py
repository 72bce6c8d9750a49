"""Keep values in this rank while the controller queries them, each under a token.

An expression is therefore evaluated once, however many queries concern its value. `release` drops a value. If the
controller is gone, a timer drops it `KEEP` seconds after the evaluation.
"""

from __future__ import annotations

import threading
from typing import Any

from monarch_kernel.debugger.rank.values.reduce import Parts

#: How long a value is kept for further queries (seconds).
KEEP = 60.0


class KeptValue:
    """A value that is being queried; `parts` is set once it was read."""

    def __init__(self, token: str, value: Any) -> None:
        self.value = value
        self.where = ""
        self.parts: Parts | None = None
        self.timer = threading.Timer(KEEP, release, (token,))
        self.timer.daemon = True
        self.timer.name = "monarch-debugger"
        self.timer.start()


_kept: dict[str, KeptValue] = {}


def keep(token: str, value: Any) -> KeptValue:
    """Keep a value."""
    kept = _kept[token] = KeptValue(token, value)
    return kept


def release(token: str) -> None:
    """Drop a value."""
    kept = _kept.pop(token, None)
    if kept is not None:
        kept.timer.cancel()


def find(token: str) -> KeptValue:
    """Return the value of a token. Raises LookupError if it is no longer kept."""
    kept = _kept.get(token)
    if kept is None:
        raise LookupError(f"the value is not kept any more: there was no question about it for {KEEP:g} s")
    return kept


def parts_of(token: str) -> Parts:
    """Return the parts of the value of a token. Raises LookupError if it is no longer kept, or has not been read."""
    parts = find(token).parts
    if parts is None:
        raise LookupError("the value has not been read yet")
    return parts
