"""Provide the base of all views in terminals and notebooks: tables as plain data, and the styles of all HTML.

It imports no other package of this project, so that the kernel, the debugger, widgets and the server can use it.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The MIME type of a widget's view, for the manager of Jupyter's widgets.
VIEW_MIME = "application/vnd.jupyter.widget-view+json"
#: The same for the extension of JupyterLab, which shows the rest of that output if there is no live view.
OUTPUT_MIME = "application/vnd.monarch-kernel.view+json"


def is_hidden(content: Mapping[str, object]) -> bool:
    """Return whether a front end runs code for its own purposes, so that the user sees neither code nor output.

    VS Code and extensions of JupyterLab run such code to list variables, for example. It is not stored in the history.

    Args:
        content: the content of the execute request.
    """
    return not content.get("store_history", not content.get("silent", False))


def runs_hidden(shell: object) -> bool:
    """Return whether the code that runs on this thread is hidden (`is_hidden`). Without a kernel, no code is hidden."""
    kernel = getattr(shell, "kernel", None)
    return kernel is not None and is_hidden((kernel.get_parent() or {}).get("content") or {})
