"""Comms of a rank, by which widgets reach the front end: their messages go the way of the rank's output.

Imported once a rank has imported the package `comm`, which `ipywidgets` does.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import comm
from comm.base_comm import BaseComm

from monarch_kernel.kernel.rank import cell_streams
from monarch_kernel.kernel.rank.plain_display import jsonable


class RankComm(BaseComm):
    """A comm whose other end is in the front end of the controller."""

    cell = ""

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        """Send a message: `comm_open`, `comm_msg` or `comm_close`."""
        self.cell = self.cell or cell_streams.current_cell()
        content = jsonable({"data": data or {}, "metadata": metadata or {}, **keys})
        encoded = [b64encode(memoryview(each).cast("B")).decode("ascii") for each in buffers or ()]
        cell_streams.emit_comm({"type": msg_type, "comm": self.comm_id, "buffers": encoded, **content})

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """Call what the widget has registered; not IPython's hooks, which would show a cell's unfinished figures."""
        if self._msg_callback is not None:
            self._msg_callback(msg)


def use() -> None:
    """Make comms of this process `RankComm`s."""
    comm.create_comm = RankComm


def receive(number: str, kind: str, content: dict[str, Any], buffers: list[bytes]) -> bool:
    """Pass a message of the front end to a comm, on the calling thread; its output belongs to the comm's cell.

    Args:
        number: the id of the comm.
        kind: `comm_msg` or `comm_close`.
        content: of the message.
        buffers: of the message.

    Returns:
        Whether there is such a comm.
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
