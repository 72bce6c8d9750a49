"""The live views of this kernel: those that are replaced, or that no page has shown for long, end."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from monarch_kernel.display import OUTPUT_MIME, VIEW_MIME

if TYPE_CHECKING:
    from monarch_kernel.widgets.mesh_widget import MeshWidget, Streams

#: So many views are kept that no page shows now: of a page that is reloaded they show the state again.
MOST_UNSEEN = 24

_lock = threading.Lock()
_views: OrderedDict[str, tuple[str, str, MeshWidget]] = OrderedDict()
"""By their models, the oldest first: the cell that shows the view, that run of it, and the view."""


def live_view(plots: Streams | None = None, **traits: Any) -> MeshWidget | None:
    """A live view for the running cell; an earlier one of the same kind of this cell ends.

    Args:
        plots: as for `MeshWidget`.
        traits: of the widget.

    Returns:
        None where the front end cannot show one: there is no kernel or no anywidget.
    """
    kernel = _kernel()
    if kernel is None or importlib.util.find_spec("anywidget") is None:
        return None
    from monarch_kernel.widgets.mesh_widget import MeshWidget

    parent = kernel.get_parent()
    metadata: dict[str, Any] = parent.get("metadata") or {}
    run = str((parent.get("header") or {}).get("msg_id", ""))
    cell = str(metadata.get("cellId") or run)
    made = MeshWidget(plots, **traits)
    with _lock:
        replaced = [key for key, (of, by, _) in _views.items() if of == cell and by != run]
        unseen = [key for key, (_, _, view) in _views.items() if not view.is_seen and key not in replaced]
        ended = [_views.pop(key)[2] for key in [*replaced, *unseen[: max(0, len(unseen) - MOST_UNSEEN + 1)]]]
        _views[made.model_id] = (cell, run, made)
    for view in ended:
        view.close()
    return made


def view_bundle(view: MeshWidget) -> dict[str, Any]:
    """What the output of a cell has of a live view, beside HTML and text that tell the same."""
    model = view.model_id
    return {VIEW_MIME: {"version_major": 2, "version_minor": 0, "model_id": model}, OUTPUT_MIME: {"model_id": model}}


def is_view(model: object) -> bool:
    """Whether a live view has this model, which is its comm, too."""
    return model in _views


def close_views() -> None:
    """End all live views."""
    with _lock:
        ended = [view for _, _, view in _views.values()]
        _views.clear()
    for view in ended:
        view.close()


def _kernel() -> Any:
    """The kernel of the running cell; None in a terminal, or without IPython."""
    kernel = getattr(shell(), "kernel", None)
    return kernel if getattr(kernel, "comm_manager", None) is not None else None


def shell() -> Any:
    """IPython's shell; None in a program."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
