"""A link for requests that this process makes of itself."""

from __future__ import annotations

from typing import Any

from monarch_kernel.runtime.node.future import Future


class LocalLink:
    """Stands for a link if this process itself asks; an answer resolves the future, if there is one."""

    peer = ""

    def __init__(self, future: Future[Any] | None = None) -> None:
        self._future = future

    def send(self, header: bytes, body: Any = b"") -> None:
        """Take the answer."""
        if self._future is not None:
            self._future._resolve(None)
