"""Views of meshes in notebooks: live ones where the front end has anywidget, and HTML that tells the state by itself.

``show(mesh)`` and ``plot(mesh, "loss")``, which are methods of meshes, too. ipywidgets is imported when the first live
view is shown, and the rest of this package when it is first used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.widgets.mesh_display import MeshDisplay
    from monarch_kernel.widgets.plot_view import Plot

__all__ = ["plot", "show"]


def show(mesh: Any) -> MeshDisplay:
    """A live view of a mesh of procs, the procs of an actor mesh, or all meshes on the hosts of a host mesh.

    Raises:
        TypeError: it is no mesh.
        RuntimeError: it was stopped.
    """
    from monarch_kernel.widgets.mesh_display import show

    return show(mesh)


def plot(mesh: Any, expression: str, *, ranks: Iterable[int] | None = None, period: float = 0.2) -> Plot:
    """Draw an expression of ranks as it changes, and show the chart in the running cell.

    Args:
        mesh: a mesh of procs or actors, or a slice of one.
        expression: of the names of the ranks' cells, or else of their actors: ``loss``, ``trainer.loss``. Its value is
            a number, or a tensor with one element.
        ranks: of ``mesh``; all by default.
        period: the shortest time between two readings (seconds), at least 0.2; with many ranks it grows.

    Raises:
        ValueError: it is no expression, or there is no such rank.
    """
    from monarch_kernel.widgets.plot_view import Plot

    made = Plot(mesh, expression, ranks, period)
    made.show()
    return made
