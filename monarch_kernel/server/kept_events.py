"""WebSocket ``kept/events``: the list of kept meshes, at once and whenever it changes.

The folder of the kept meshes is watched (inotify) while a page listens, by one thread for all pages; else nothing runs.
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
from tornado.websocket import WebSocketClosedError, WebSocketHandler
from watchfiles import watch

from monarch_kernel.meshes import KeptError, kept, kept_place
from monarch_kernel.server.kept_handlers import described


class KeptEvents(WebSocketMixin, WebSocketHandler, JupyterHandler):  # pyright: ignore[reportIncompatibleMethodOverride]
    """One page that listens. What it sends is ignored."""

    auth_resource = "monarch_kernel"

    @ws_authenticated
    @authorized
    async def get(self, *args: Any, **kwargs: Any) -> None:
        """Upgrade the connection."""
        await super().get(*args, **kwargs)

    def open(self, *args: Any, **kwargs: Any) -> None:
        """Send the list, and again at each change."""
        super().open(*args, **kwargs)
        _listeners.add(self)

    def on_message(self, message: str | bytes) -> None:
        """Nothing is expected."""

    def on_close(self) -> None:
        """The page has gone."""
        _listeners.discard(self)

    def tell(self, text: str) -> None:
        """Send a text, if the page is still there."""
        try:
            self.write_message(text)
        except WebSocketClosedError:
            _listeners.discard(self)


class _Listeners:
    """All pages that listen, and the thread that watches for them while there are any."""

    def __init__(self) -> None:
        self._pages: set[KeptEvents] = set()
        self._stop: threading.Event | None = None
        self._told = ""

    def add(self, page: KeptEvents) -> None:
        """A page has come; called by the server's loop, as all but ``_watch`` is."""
        self._pages.add(page)
        if self._stop is None:
            self._stop = threading.Event()
            args = (self._stop, asyncio.get_running_loop())
            threading.Thread(target=self._watch, args=args, name="monarch-kept-watch", daemon=True).start()
        elif self._told:
            page.tell(self._told)

    def discard(self, page: KeptEvents) -> None:
        """A page has gone."""
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
            # Looks each second, too: what changed before the watch had begun is then not missed.
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
