"""Define the addresses of the extension, below ``<base_url>/monarch-kernel/api``, and its WebSocket.

``openapi.json`` describes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from jupyter_server.auth.decorator import authorized, ws_authenticated
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.websocket import WebSocketClosedError, WebSocketHandler
from watchfiles import watch

from monarch_kernel.meshes import KeptError, KeptInfo, end_kept, kept, kept_logs, kept_place, kept_ranks

# Serve a REST API for the kept meshes of this user, their ranks, their output, and their end.
#
# The server (``jupyter_server.auth``) authenticates and authorizes each request; the resource is "monarch_kernel", the
# actions are "read" and "write". Errors are JSON, ``{"message": ...}``: 400 for invalid input, 404 if the mesh does not
# exist, 409 if another process holds it, 503 if it does not answer.

T = TypeVar("T")

#: The number of log lines in one answer: the default, and the maximum.
LINES, MOST_LINES = 1_000, 100_000


def described(info: KeptInfo) -> dict[str, object]:
    """Describe a kept mesh for pages, with the line that attaches to it in a notebook."""
    about = msgspec.to_builtins(info)
    del about["url"]
    return {**about, "attach": f"%mesh attach {info.name}"}


class _KeptBase(APIHandler):
    """Runs blocking work on a thread, and converts its errors to answers."""

    auth_resource = "monarch_kernel"

    async def _answer(self, work: Callable[[], object]) -> None:
        try:
            value = await asyncio.to_thread(work)
        except KeptError as error:
            text = str(error)
            self._fail(409 if error.held else 404 if "there is no kept mesh" in text else 503, text)
        except ValueError as error:
            self._fail(400, str(error))
        else:
            self.finish(json.dumps(value))

    def _fail(self, status: int, message: str) -> None:
        self.set_status(status)
        self.finish(json.dumps({"message": message}))

    def _number(self, name: str, default: int, most: int) -> int:
        """Parse a query argument between 0 and ``most``.

        Raises:
            ValueError: the argument is invalid.
        """
        text = self.get_query_argument(name, str(default))
        if not text.isdecimal() or int(text) > most:
            raise ValueError(f"{name}={text!r} must be a whole number from 0 to {most}")
        return int(text)


class KeptListHandler(_KeptBase):
    """Handle ``kept``: all kept meshes."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Return ``{"meshes": [...]}``, by name."""
        await self._answer(lambda: {"meshes": [described(info) for info in kept()]})


class KeptHandler(_KeptBase):
    """Handle ``kept/NAME``: one kept mesh."""

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """Return its description, with the current state of its ``ranks``."""

        def look() -> dict[str, object]:
            ranks = [msgspec.to_builtins(rank) for rank in kept_ranks(name)]
            about = [described(info) for info in kept() if info.name == name]
            if not about:
                raise KeptError(f"there is no kept mesh {name!r}: it has just ended")
            return {**about[0], "ranks": ranks}

        await self._answer(look)


class KeptLogsHandler(_KeptBase):
    """Handle ``kept/NAME/logs``: output of its ranks."""

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """Return ``{"logs": [{"mesh", "rank", "text"}]}``.

        In the query, ``mesh`` and ``rank`` (any number of them) select the logs; ``tail`` is the number of lines of
        each, 0 for all.
        """

        def read() -> dict[str, list[dict[str, str | int]]]:
            tail = self._number("tail", LINES, MOST_LINES)
            ranks = [int(each) for each in self.get_query_arguments("rank") if each.isdecimal()]
            if len(ranks) != len(self.get_query_arguments("rank")):
                raise ValueError("rank must be a whole number")
            texts = kept_logs(name, self.get_query_argument("mesh", ""), ranks, tail or MOST_LINES)
            return {"logs": [{"mesh": mesh, "rank": rank, "text": text} for (mesh, rank), text in texts.items()]}

        await self._answer(read)


class _StopBody(msgspec.Struct):
    force: bool = False


class KeptStopHandler(_KeptBase):
    """Handle ``kept/NAME/stop``: the end of one kept mesh."""

    @web.authenticated
    @authorized
    async def post(self, name: str) -> None:
        """End the mesh; with ``{"force": true}`` as body, also if another process holds it. Answer when it is gone."""
        try:
            body = msgspec.json.decode(self.request.body.strip() or b"{}", type=_StopBody)
        except (msgspec.MsgspecError, ValueError, RecursionError):  # ValueError: the body is not UTF-8
            self._fail(400, 'the body must be {"force": true or false}, or nothing')
            return
        await self._answer(lambda: described(end_kept(name, body.force)))


class DescriptionHandler(_KeptBase):
    """Handle ``openapi.json``: the description of this API, for programs."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Return the OpenAPI 3.1 description, with the address of this server."""
        about = json.loads((Path(__file__).parent / "openapi.json").read_text())
        about["servers"] = [{"url": f"{self.base_url}monarch-kernel/api"}]
        self.finish(json.dumps(about))


class KeptEvents(WebSocketMixin, WebSocketHandler, JupyterHandler):  # pyright: ignore[reportIncompatibleMethodOverride]
    """WebSocket ``kept/events``: sends the list of kept meshes at once and after each change. Ignores messages.

    While any page listens, one thread watches the folder of the kept meshes (inotify).
    """

    auth_resource = "monarch_kernel"

    @ws_authenticated
    @authorized
    async def get(self, *args: object, **kwargs: object) -> None:
        """Upgrade the connection."""
        await super().get(*args, **kwargs)

    def open(self, *args: object, **kwargs: object) -> None:
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


def handlers(base_url: str) -> list[tuple[str, object]]:
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
