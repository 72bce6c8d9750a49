"""The mesh debugger: stop, see and compare every rank. ``monarch_kernel.debug`` has its public names.

In a rank nothing of this is loaded before it is asked something, or comes to a ``breakpoint()``; and then only the
parts that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hub import MeshDebugger

#: Called with the debugger of this process when somebody has made one, by whichever thread that was.
on_made: list[Callable[[MeshDebugger], object]] = []


def get_debugger() -> MeshDebugger:
    """The debugger of this controller; made by the first who asks."""
    from monarch_kernel.debugger.controller import hub

    return hub.get_debugger()


def existing_debugger() -> MeshDebugger | None:
    """The debugger of this controller, if anybody has asked for it."""
    from monarch_kernel.debugger.controller import hub

    return hub.existing_debugger()


def select(mesh: Any = None, ranks: Any = None) -> Any:
    """The ranks of a mesh (None: of all) that are stopped, as a set that is stepped together (`sets.StopSet`)."""
    return get_debugger().select(mesh, ranks)
