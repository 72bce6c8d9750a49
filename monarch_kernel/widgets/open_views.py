"""Track the live views of this kernel. Views end that are replaced, or that no page has shown for long."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from monarch_kernel.display import OUTPUT_MIME, VIEW_MIME

if TYPE_CHECKING:
    from monarch_kernel.widgets.mesh_widget import MeshWidget, Streams

#: The maximum number of kept views that no page shows. When their page is reloaded, they show the state again.
MOST_UNSEEN = 24

_lock = threading.Lock()
_views: OrderedDict[str, tuple[str, str, MeshWidget]] = OrderedDict()
"""By their models, the oldest first: the cell that shows the view, that run of it, and the view."""


def live_view(plots: Streams | None = None, **traits: object) -> MeshWidget | None:
    """Create a live view for the running cell. An earlier one of the same kind in this cell ends.

    Args:
        plots: as for `MeshWidget`.
        traits: the traits of the widget.

    Returns:
        The view; None if the front end cannot show one, because there is no kernel or no anywidget, or in Colab.
    """
    kernel = _kernel()
    # Colab shows an error instead of the HTML beside a widget that its own manager does not know.
    if kernel is None or importlib.util.find_spec("anywidget") is None or "google.colab" in sys.modules:
        return None
    from monarch_kernel.widgets.mesh_widget import MeshWidget

    parent = kernel.get_parent()
    metadata: dict[str, object] = parent.get("metadata") or {}
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


def view_bundle(view: MeshWidget) -> dict[str, object]:
    """Return the entries of a live view in a cell's output, in addition to equivalent HTML and text."""
    model = view.model_id
    return {VIEW_MIME: {"version_major": 2, "version_minor": 0, "model_id": model}, OUTPUT_MIME: {"model_id": model}}


def is_view(model: object) -> bool:
    """Return whether a live view has this model, which is also its comm."""
    return model in _views


def close_views() -> None:
    """End all live views."""
    with _lock:
        ended = [view for _, _, view in _views.values()]
        _views.clear()
    for view in ended:
        view.close()


def _kernel() -> Any:
    """Return the kernel of the running cell; None in a terminal, or without IPython."""
    kernel = getattr(shell(), "kernel", None)
    return kernel if getattr(kernel, "comm_manager", None) is not None else None


def shell() -> Any:
    """Return IPython's shell; None in a program."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
