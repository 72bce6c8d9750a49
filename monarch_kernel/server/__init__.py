"""The extension of the Jupyter server: what outlives a kernel, for pages that have none (docs/panel.md).

Meshes of a living kernel are not its business: pages talk to the kernel itself. It needs neither torch nor a kernel in
the server's environment, opens no port, and starts no runtime: kept meshes are asked over their own Unix sockets.

The two functions have the names by which Jupyter servers find an extension.
"""

from __future__ import annotations

from typing import Any

__all__ = ["_jupyter_server_extension_points", "_load_jupyter_server_extension"]


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "monarch_kernel.server"}]


def _load_jupyter_server_extension(app: Any) -> None:
    """Add the handlers to a Jupyter server."""
    from monarch_kernel.server.routes import handlers

    app.web_app.add_handlers(".*$", handlers(app.web_app.settings["base_url"]))
