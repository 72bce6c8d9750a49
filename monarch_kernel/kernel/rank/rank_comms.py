"""Comms of a rank, which connect widgets to the front end. Their messages travel like the rank's output.

This module is imported after a rank has imported the package `comm`, which `ipywidgets` does.

If a front end has no live widgets, an output shows the widget's text. The text is updated when the cell ends, and the
output of a closed widget is removed.
"""

from __future__ import annotations

from base64 import b64encode
from collections import defaultdict
from contextvars import copy_context
from typing import Any

import comm
from comm.base_comm import BaseComm

from monarch_kernel.display import OUTPUT_MIME
from monarch_kernel.kernel.rank import cell_streams
from monarch_kernel.kernel.rank.sent_values import jsonable

#: The outputs in which cells show each widget: MIME bundle and metadata by cell, by the widget's model.
_shown: defaultdict[str, dict[str, tuple[dict[str, object], dict[str, object]]]] = defaultdict(dict)


class RankComm(BaseComm):
    """A comm whose other end is in the front end of the controller."""

    cell = ""

    def publish_msg(
        self, msg_type: str, data: object = None, metadata: object = None, buffers: Any = None, **keys: object
    ) -> None:
        """Send a message: `comm_open`, `comm_msg` or `comm_close`."""
        self.cell = self.cell or cell_streams.current_cell()
        content = jsonable({"data": data or {}, "metadata": metadata or {}, **keys})
        encoded = [b64encode(memoryview(each).cast("B")).decode("ascii") for each in buffers or ()]
        cell_streams.emit_comm({"type": msg_type, "comm": self.comm_id, "buffers": encoded, **content})
        if msg_type == "comm_close":
            for cell in _shown.pop(self.comm_id, {}):
                _replace(cell, self.comm_id, {}, {})

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """Call the widget's callback, but not IPython's hooks, which would show a cell's unfinished figures."""
        if self._msg_callback is not None:
            self._msg_callback(msg)


def use() -> None:
    """Make comms of this process `RankComm`s."""
    comm.create_comm = RankComm


def note_shown(model: str, data: dict[str, object], metadata: dict[str, object]) -> str | None:
    """Record that the running cell shows a MIME bundle with the view of the widget that has this model.

    Returns:
        The display id by which the output is replaced; None if no widget of this rank has that view.
    """
    if not isinstance(comm.get_comm_manager().comms.get(model), RankComm):
        return None
    data[OUTPUT_MIME] = {"model_id": model}
    _shown[model][cell_streams.current_cell()] = data, metadata
    return model


def update_texts() -> None:
    """Replace the texts of widgets in the running cell that have changed."""
    cell = cell_streams.current_cell()
    for model, outputs in list(_shown.items()):
        found = comm.get_comm_manager().comms.get(model)
        widget = getattr(getattr(found, "_msg_callback", None), "__self__", None)
        if cell not in outputs or widget is None:
            continue
        data, metadata = outputs[cell]
        try:
            text = widget._repr_mimebundle_()["text/plain"]
        except Exception:  # user code of a widget
            continue
        if text != data["text/plain"]:
            outputs[cell] = {**data, "text/plain": text}, metadata
            _replace(cell, model, *outputs[cell])


def _replace(cell: str, model: str, data: dict[str, object], metadata: dict[str, object]) -> None:
    def emit() -> None:
        cell_streams.set_cell(cell)
        cell_streams.emit_display(data, metadata, display_id=model, update=True)

    copy_context().run(emit)


def receive(number: str, kind: str, content: dict[str, object], buffers: list[bytes]) -> bool:
    """Pass a message of the front end to a comm, on the calling thread; its output belongs to the comm's cell.

    Args:
        number: the id of the comm.
        kind: `comm_msg` or `comm_close`.
        content: the content of the message.
        buffers: the buffers of the message.

    Returns:
        Whether the comm exists.
    """
    manager = comm.get_comm_manager()
    found = manager.comms.get(number)
    if not isinstance(found, RankComm):
        return False
    message = {"header": {}, "parent_header": {}, "metadata": {}, "content": content, "buffers": buffers}
    cell_streams.set_cell(found.cell)
    try:
        if kind == "comm_close":
            del manager.comms[number]
            found._closed = True
            found.handle_close(message)
        else:
            found.handle_msg(message)
    finally:
        cell_streams.flush()
        cell_streams.set_cell(None)
    return True
