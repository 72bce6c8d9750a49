"""What a kubelet serves to its API server: logs, and connections to the ports of Pods.

The API server passes a request for ``portforward`` on as it is, so the kubelet speaks its protocol: a WebSocket with
two channels for each port, data and errors, each of which begins with the number of the port.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tornado import httpserver, netutil, web, websocket

PROTOCOL = "v4.channel.k8s.io"
_DATA, _ERROR = b"\0", b"\1"
_PIECE = 1 << 16


class KubeletServer:
    """Serves on a thread of its own, which asks the API server itself. Nobody is asked who may do what here.

    Args:
        cert, key: files.
        log: what a Pod has written, by its namespace, its name and the query; None: there is no such container.
        localhost: where the loopback address of a Pod is on this machine, by its namespace and name; "": nothing of
            the Pod listens there.
    """

    def __init__(
        self,
        cert: Path,
        key: Path,
        log: Callable[[str, str, dict[str, str]], bytes | None],
        localhost: Callable[[str, str], str],
    ) -> None:
        self.log = log
        self.localhost = localhost
        (self._socket,) = netutil.bind_sockets(0, "127.0.0.1")
        self.port: int = self._socket.getsockname()[1]
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(cert, key)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kubelet-server")
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        handlers: list[Any] = [
            ("/containerLogs/([^/]+)/([^/]+)/[^/]+", _Log, {"server": self}),
            ("/portForward/([^/]+)/([^/]+)", _Forward, {"server": self}),
        ]
        server = httpserver.HTTPServer(web.Application(handlers), ssl_options=self._tls)
        server.add_socket(self._socket)
        self._loop.run_forever()
        server.stop()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(server.close_all_connections(), *left, return_exceptions=True))
        self._loop.close()

    def close(self) -> None:
        """End the thread and all connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class _Log(web.RequestHandler):
    def initialize(self, server: KubeletServer) -> None:
        self.server = server

    def get(self, namespace: str, name: str) -> None:
        query = {key: self.get_query_argument(key) for key in self.request.query_arguments}
        data = self.server.log(namespace, name, query)
        self.set_status(404 if data is None else 200)
        self.finish(data or b"")


class _Forward(websocket.WebSocketHandler):
    def initialize(self, server: KubeletServer) -> None:
        self.server = server
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def check_origin(self, origin: str) -> bool:
        return True

    def select_subprotocol(self, subprotocols: list[str]) -> str | None:
        return PROTOCOL if PROTOCOL in subprotocols else None

    async def open(self, *args: str, **_kwargs: str) -> None:
        namespace, name = args
        port = int(self.get_query_argument("port"))
        for channel in (_DATA, _ERROR):
            await self.write_message(channel + port.to_bytes(2, "little"), binary=True)
        address = self.server.localhost(namespace, name)
        try:
            if not address:
                raise ConnectionRefusedError("connect: Connection refused")
            reader, self._writer = await asyncio.open_connection(address, port)
        except OSError as e:
            why = f"error forwarding port {port} to pod {name}: {e}"
            await self.write_message(_ERROR + why.encode(), binary=True)
            self.close()
            return
        task = asyncio.ensure_future(self._carry(reader))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, websocket.WebSocketClosedError):
            while data := await reader.read(_PIECE):
                await self.write_message(_DATA + data, binary=True)
        self.close()

    async def on_message(self, message: str | bytes) -> None:
        assert isinstance(message, bytes) and message[:1] == _DATA
        if self._writer is not None:
            self._writer.write(message[1:])
            with contextlib.suppress(OSError):
                await self._writer.drain()

    def on_close(self) -> None:
        if self._writer is not None:
            self._writer.close()
