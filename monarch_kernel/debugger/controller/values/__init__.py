"""Values across ranks: `diff` says who has which value and where they differ, `pull` moves one here.

Ranks reduce a value to digests and figures (`debugger.rank.values`); the controller compares those (`compare`) and
shows them (`report`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.values.query import diff, pull
    from monarch_kernel.debugger.controller.values.report import Diff

__all__ = ["Diff", "diff", "pull"]


def __getattr__(name: str) -> Any:
    """These names are loaded when they are used."""
    if name in ("diff", "pull"):
        from monarch_kernel.debugger.controller.values import query as questions

        return getattr(questions, name)
    if name == "Diff":
        from monarch_kernel.debugger.controller.values.report import Diff

        return Diff
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
