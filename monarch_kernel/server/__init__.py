"""The extension of the Jupyter server. It serves meshes that outlive a kernel, to pages without one (docs/panel.md).

It does not handle meshes of a living kernel: pages send requests to the kernel itself. It needs neither torch nor a
kernel in the server's environment, opens no port, and starts no runtime. It queries kept meshes over their own Unix
sockets.

Jupyter servers find an extension by the names of the two functions.
"""

from __future__ import annotations

from typing import Any

__all__ = ["_jupyter_server_extension_points", "_load_jupyter_server_extension"]


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "monarch_kernel.server"}]


def _load_jupyter_server_extension(app: Any) -> None:
    """Add the handlers to a Jupyter server. If a package that they need is missing, log it once."""
    try:
        from monarch_kernel.server.routes import handlers
    except ModuleNotFoundError as error:
        if (error.name or "monarch_kernel").partition(".")[0] == "monarch_kernel":
            raise
        app.log.warning(
            "monarch_kernel.server: kept meshes are not listed, because this environment lacks the package %s; "
            "'monarch-kernel doctor server' says how to add it",
            error.name,
        )
        return
    app.web_app.add_handlers(".*$", handlers(app.web_app.settings["base_url"]))
