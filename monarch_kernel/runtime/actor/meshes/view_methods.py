"""Views of meshes as methods of them; ``monarch_kernel.widgets`` is loaded on first use."""

from __future__ import annotations

from functools import partial
from typing import Any

from monarch_kernel.runtime.actor.extensions import view_functions


class ViewMethods:
    """The method ``show`` of every mesh."""

    def show(self) -> Any:
        """Return a live view of this mesh, for the last line of a cell; see ``monarch_kernel.widgets.show``."""
        return view_functions().show(self)


class PlotMethods(ViewMethods):
    """The methods ``show`` and ``plot`` of meshes that have ranks."""

    def plot(self, expression: str, **options: Any) -> Any:
        """Draw an expression of the ranks as it changes while a cell runs; see ``monarch_kernel.widgets.plot``."""
        return view_functions().plot(self, expression, **options)


def view_method(mesh: Any, name: str) -> Any:
    """Return `show` or `plot` of an actor mesh, unless an endpoint has this name; None for another name."""
    return partial(getattr(view_functions(), name), mesh) if name in ("show", "plot") else None
