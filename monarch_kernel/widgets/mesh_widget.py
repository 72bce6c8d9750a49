"""The live views as an anywidget. This module is imported when the first view is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from monarch_kernel.widgets.connection import Closable, ViewConnection, comm_sender

Streams = Callable[[Mapping[str, object], Callable[[dict[str, object]], object]], Closable]
"""Begins the stream for a `plot` message; its `points` are pushed."""


class MeshWidget(anywidget.AnyWidget):  # type: ignore[misc,unused-ignore]
    """A live view of a mesh, of a plot over its ranks, or of a grid; docs/watching.md has its traits and messages.

    Args:
        plots: returns the points of the view's plot; by default, each view reads the expression itself.
    """

    _esm = Path(__file__).parent / "static" / "mesh.js"  # built from labextension/src/widget

    view = traitlets.Unicode("mesh").tag(sync=True)
    mesh = traitlets.Unicode("").tag(sync=True)
    ranks = traitlets.List(traitlets.Int()).tag(sync=True)
    record = traitlets.Unicode("").tag(sync=True)
    expression = traitlets.Unicode("").tag(sync=True)
    period = traitlets.Float(0.2).tag(sync=True)
    grid = traitlets.Dict().tag(sync=True)

    def __init__(self, plots: Streams | None = None, **traits: object) -> None:
        super().__init__(**traits)
        comm: Any = self.comm
        send = comm_sender(comm)
        self._connection = ViewConnection(lambda message: send({"method": "custom", "content": message}), plots)
        # Set on the instance, so that a click runs no hooks of IPython during a cell.
        comm.handle_msg = self._take
        # ipykernel passes messages of a page to the shell that opened the comm, where they would wait for the running
        # cell. The page prefers a subshell.
        if hasattr(comm, "_reply_subshell_for"):
            comm._reply_subshell_for = lambda _data, chosen: chosen
        comm.on_close(lambda _message: self._connection.close())

    def _take(self, message: dict[str, Any]) -> None:
        data = message["content"].get("data") or {}
        if data.get("method") == "custom" and isinstance(data.get("content"), dict):
            self._connection.receive(data["content"])
        else:
            self._handle_msg(message)

    @property
    def is_seen(self) -> bool:
        """Whether a page currently shows it."""
        return self._connection.is_open

    def close(self) -> None:
        """End the view. It keeps showing the last state."""
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.close()
        super().close()
