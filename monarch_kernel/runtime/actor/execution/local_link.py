"""A link for requests that this process sends to itself."""

from __future__ import annotations

from typing import Any

from monarch_kernel.runtime.node.future import Future


class LocalLink:
    """Replaces a link when this process sends a request to itself; an answer resolves the future, if there is one."""

    peer = ""

    def __init__(self, future: Future[Any] | None = None) -> None:
        self._future = future

    def send(self, header: bytes, body: Any = b"") -> None:
        """Take the answer."""
        if self._future is not None:
            self._future._resolve(None)
