"""Values across ranks: `diff` says who has which value and where they differ, `pull` moves one here.

Ranks reduce a value (`reduce`, `tensors`, `arrays`) to digests and figures; the controller compares those (`compare`)
and shows them (`report`). Nothing here imports torch before a value is a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.debugger.values.questions import diff, pull
    from monarch_kernel.debugger.values.report import Diff

__all__ = ["Diff", "diff", "digest", "pull"]

#: How long `digest` may read (seconds).
DIGEST_TIMEOUT = 5.0


def digest(value: Any) -> str:
    """A text that is equal for equal values, whichever process they are in.

    Values that take longer to read than `DIGEST_TIMEOUT` all have the same one: nobody can say that they differ.
    """
    from monarch_kernel.debugger.values.blocks import Deadline, TimeLimitError
    from monarch_kernel.debugger.values.reduce import Parts

    try:
        return Parts(value, Deadline(DIGEST_TIMEOUT)).reading().digest.hex()
    except TimeLimitError:
        return "too large to read"


def __getattr__(name: str) -> Any:
    """The names that ranks need not load."""
    if name in ("diff", "pull"):
        from monarch_kernel.debugger.values import questions

        return getattr(questions, name)
    if name == "Diff":
        from monarch_kernel.debugger.values.report import Diff

        return Diff
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
