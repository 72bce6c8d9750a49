"""The comm `monarch_kernel.views`: one for each page that shows this kernel's meshes.

Messages from the page bypass IPython's hooks, which would run `pre_execute` in the middle of a cell, and the kernel
publishes no busy or idle status for them. Messages to the page are sent from threads of the connection. A running cell
therefore does not delay them, and they do not show its kernel as idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from monarch_kernel.widgets.connection import ViewConnection, comm_sender
from monarch_kernel.widgets.open_views import is_view

TARGET = "monarch_kernel.views"


class CommTarget:
    """The pages that are connected to one kernel.

    Args:
        kernel: the kernel.
    """

    def __init__(self, kernel: Any) -> None:
        self._comms: Any = kernel.comm_manager
        self._open: dict[str, ViewConnection] = {}
        self._status = QuietStatus(kernel, self._is_ours)
        self._comms.register_target(TARGET, self._on_open)

    def close(self) -> None:
        """End all connections, and accept no new ones."""
        self._comms.targets.pop(TARGET, None)
        self._status.close()
        for connection in list(self._open.values()):
            connection.close()
        self._open.clear()

    def _is_ours(self, message: Mapping[str, Any]) -> bool:
        kind, content = message.get("header", {}).get("msg_type"), message.get("content", {})
        if kind == "comm_open":
            return content.get("target_name") == TARGET
        number = content.get("comm_id")
        return kind in ("comm_msg", "comm_close") and (number in self._open or is_view(number))

    def _on_open(self, comm: Any, message: dict[str, Any]) -> None:
        connection = self._open[comm.comm_id] = ViewConnection(comm_sender(comm))

        def on_message(received: dict[str, Any]) -> None:
            data = received["content"].get("data")
            if isinstance(data, dict):
                connection.receive(data)

        def on_close(_received: dict[str, Any]) -> None:
            self._open.pop(comm.comm_id, None)
            connection.close()

        comm.handle_msg = on_message
        comm.on_close(on_close)
        on_message(message)  # a page may send its first lease with the comm_open


class QuietStatus:
    """Keep the kernel from publishing busy and idle for the messages of a page.

    The kernel publishes the status around each message, also on a subshell. JupyterLab shows the last status, so each
    renewed lease of a page would show a kernel in the middle of a cell as idle.

    Args:
        kernel: the kernel.
        is_quiet: returns whether to publish no status for a message; called before the message is handled, on any
            thread.
    """

    def __init__(self, kernel: Any, is_quiet: Callable[[Mapping[str, Any]], bool]) -> None:
        self._kernel = kernel
        self._is_quiet = is_quiet
        self._publish: Callable[..., None] = kernel._publish_status
        self._under_way: set[str] = set()
        kernel._publish_status = self._filtered

    def close(self) -> None:
        """Publish the status around all messages again."""
        self._kernel.__dict__.pop("_publish_status", None)

    def _filtered(self, status: str, channel: str, parent: Any = None) -> None:
        message: Mapping[str, Any] = parent or self._kernel.get_parent(channel) or {}
        number = str(message.get("header", {}).get("msg_id", ""))
        if status == "busy" and self._is_quiet(message):
            self._under_way.add(number)
        elif status == "idle" and number in self._under_way:
            self._under_way.discard(number)
        else:
            self._publish(status, channel, parent)
