"""The mesh debugger: stop, inspect and compare every rank. ``monarch_kernel.debug`` has its public names.

* ``rank``: the code that runs in ranks, from the debug agent to the tracer. A rank loads none of it before a query
  or a ``breakpoint()``, and then only the parts that it needs.
* ``controller``: the code that runs in the controller: breakpoints, stops, viewers, queries, and reports on answers.
* ``commands``: shared by the prompt, the magics and the terminal. ``terminal`` and ``dap`` serve terminals and IDEs.
* ``model``, ``events``, ``frames``, ``source_locations``: shared by both sides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from monarch_kernel.subscriptions import Subscribers

if TYPE_CHECKING:
    from monarch_kernel.actor import ActorMesh, ProcMesh
    from monarch_kernel.debugger.controller.hang.verdict import Verdict
    from monarch_kernel.debugger.controller.hub import MeshDebugger
    from monarch_kernel.debugger.controller.registry import MeshOrName
    from monarch_kernel.debugger.controller.sets import StopSet

#: Notified with the debugger of this process when it has been created, on the thread that created it.
on_made: Subscribers[[MeshDebugger]] = Subscribers("a callback of debugger.on_made")

#: Notified with a mesh and the verdict on all its ranks whenever one was reached, on the thread that requested it.
on_verdict: Subscribers[[ProcMesh | ActorMesh[object], Verdict]] = Subscribers("a callback of debugger.on_verdict")


def get_debugger() -> MeshDebugger:
    """Return the debugger of this controller. The first call creates it."""
    from monarch_kernel.debugger.controller import hub

    return hub.get_debugger()


def existing_debugger() -> MeshDebugger | None:
    """Return the debugger of this controller; None if there is none yet."""
    hub = sys.modules.get("monarch_kernel.debugger.controller.hub")  # without it, there is none
    return None if hub is None else hub.existing_debugger()


def select(mesh: MeshOrName | None = None, ranks: Iterable[int] | None = None) -> StopSet:
    """Return the stopped ranks of a mesh (None: of all meshes) as a set whose ranks step together (`sets.StopSet`)."""
    return get_debugger().select(mesh, ranks)
