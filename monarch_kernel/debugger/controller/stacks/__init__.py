"""The stacks of all ranks, merged: `gather` asks, `snapshot` answers in a rank, `merge`, `text` and `html` show it.

Names are loaded when they are used: a rank needs `snapshot` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.stacks.gather import Stacks, stacks

__all__ = ["Stacks", "stacks"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from monarch_kernel.debugger.controller.stacks import gather

        return getattr(gather, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
