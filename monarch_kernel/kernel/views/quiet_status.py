"""Keeps the kernel from saying that it is busy and idle for the messages of a page.

The kernel says so around each message, also one on a subshell. JupyterLab shows the last of it, so that a page that
renews its lease would have a kernel in the middle of a cell shown as idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class QuietStatus:
    """A kernel that says nothing of some messages.

    Args:
        kernel: the kernel.
        is_quiet: whether it is to say nothing of a message; called before the message is handled, on any thread.
    """

    def __init__(self, kernel: Any, is_quiet: Callable[[Mapping[str, Any]], bool]) -> None:
        self._kernel = kernel
        self._is_quiet = is_quiet
        self._publish: Callable[..., None] = kernel._publish_status
        self._under_way: set[str] = set()
        kernel._publish_status = self._filtered

    def close(self) -> None:
        """Have the kernel say it of all messages again."""
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
