"""Define the addresses of the extension, below ``<base_url>/monarch-kernel/api``, and its WebSocket.

``openapi.json`` describes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import Any

from jupyter_server.auth.decorator import authorized, ws_authenticated
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from jupyter_server.utils import url_path_join
from tornado.websocket import WebSocketClosedError, WebSocketHandler
from watchfiles import watch

from monarch_kernel.meshes import KeptError, kept, kept_place
from monarch_kernel.server.kept_handlers import (
    DescriptionHandler,
    KeptHandler,
    KeptListHandler,
    KeptLogsHandler,
    KeptStopHandler,
    described,
)


class KeptEvents(WebSocketMixin, WebSocketHandler, JupyterHandler):  # pyright: ignore[reportIncompatibleMethodOverride]
    """WebSocket ``kept/events``: sends the list of kept meshes at once and after each change. Ignores messages.

    While any page listens, one thread watches the folder of the kept meshes (inotify).
    """

    auth_resource = "monarch_kernel"

    @ws_authenticated
    @authorized
    async def get(self, *args: Any, **kwargs: Any) -> None:
        """Upgrade the connection."""
        await super().get(*args, **kwargs)

    def open(self, *args: Any, **kwargs: Any) -> None:
        """Send the list now, and again after each change."""
        super().open(*args, **kwargs)
        _listeners.add(self)

    def on_message(self, message: str | bytes) -> None:
        """Ignore a message."""

    def on_close(self) -> None:
        """Handle that the page is gone."""
        _listeners.discard(self)

    def tell(self, text: str) -> None:
        """Send a text, if the page is still connected."""
        try:
            self.write_message(text)
        except WebSocketClosedError:
            _listeners.discard(self)


class _Listeners:
    """The listening pages, and the thread that watches the folder while there are any."""

    def __init__(self) -> None:
        self._pages: set[KeptEvents] = set()
        self._stop: threading.Event | None = None
        self._told = ""

    def add(self, page: KeptEvents) -> None:
        """Add a page. Like all methods except ``_watch``, the server's loop calls this."""
        self._pages.add(page)
        if self._stop is None:
            self._stop = threading.Event()
            args = (self._stop, asyncio.get_running_loop())
            threading.Thread(target=self._watch, args=args, name="monarch-kept-watch", daemon=True).start()
        elif self._told:
            page.tell(self._told)

    def discard(self, page: KeptEvents) -> None:
        """Remove a page."""
        self._pages.discard(page)
        if not self._pages and self._stop is not None:
            self._stop.set()
            self._stop, self._told = None, ""

    def _tell(self, stop: threading.Event, text: str) -> None:
        if stop is self._stop and text != self._told:
            self._told = text
            for page in list(self._pages):
                page.tell(text)

    def _watch(self, stop: threading.Event, loop: asyncio.AbstractEventLoop) -> None:
        def tell(text: str) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(self._tell, stop, text)

        try:
            place = kept_place()
            tell(_listed())
            # It also checks every second, to detect changes before the watch began.
            for _ in watch(
                place, stop_event=stop, debounce=200, rust_timeout=1_000, yield_on_timeout=True, raise_interrupt=False
            ):
                tell(_listed())
        except (KeptError, OSError) as error:
            tell(_failed(error))


def _listed() -> str:
    try:
        return json.dumps({"kind": "kept", "meshes": [described(info) for info in kept()]})
    except KeptError as error:
        return _failed(error)


def _failed(error: Exception) -> str:
    return json.dumps({"kind": "error", "message": str(error)})


_listeners = _Listeners()


_NAME = r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,31})"


def handlers(base_url: str) -> list[tuple[str, Any]]:
    """Return the pattern of each address, with its handler."""
    root = url_path_join(base_url, "monarch-kernel", "api")
    return [
        (url_path_join(root, "openapi.json"), DescriptionHandler),
        (url_path_join(root, "kept"), KeptListHandler),
        (url_path_join(root, "kept", "events"), KeptEvents),
        (url_path_join(root, "kept", _NAME), KeptHandler),
        (url_path_join(root, "kept", _NAME, "logs"), KeptLogsHandler),
        (url_path_join(root, "kept", _NAME, "stop"), KeptStopHandler),
    ]
