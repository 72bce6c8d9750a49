"""Show meshes in notebooks: as live views if the front end has anywidget, and as static HTML of their state.

The functions ``show(mesh)`` and ``plot(mesh, "loss")`` are methods of meshes, too. ipywidgets is imported when the
first live view is shown, and the rest of this package when it is first used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.widgets.mesh_display import MeshDisplay
    from monarch_kernel.widgets.plot_view import Plot

__all__ = ["plot", "show"]


def show(mesh: Any) -> MeshDisplay:
    """Show a live view of a mesh of procs, the procs of an actor mesh, or all meshes on the hosts of a host mesh.

    Raises:
        TypeError: ``mesh`` is not a mesh.
        RuntimeError: the mesh was stopped.
    """
    from monarch_kernel.widgets.mesh_display import show

    return show(mesh)


def plot(mesh: Any, expression: str, *, ranks: Iterable[int] | None = None, period: float = 0.2) -> Plot:
    """Plot an expression of ranks over time, and show the chart in the running cell.

    Args:
        mesh: a mesh of procs or actors, or a slice of one.
        expression: an expression of the names in the ranks' cells, or else in their actors: ``loss``, ``trainer.loss``.
            Its value is a number, or a tensor with one element.
        ranks: the ranks of ``mesh``; all by default.
        period: the minimum time between two readings (seconds), at least 0.2; with many ranks it grows.

    Raises:
        ValueError: it is not an expression, or the mesh has no such rank.
    """
    from monarch_kernel.widgets.plot_view import Plot

    made = Plot(mesh, expression, ranks, period)
    made.show()
    return made
