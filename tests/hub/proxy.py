"""A reverse proxy that buffers: it passes on a request, and an answer, when it has all of it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from urllib.parse import urlsplit, urlunsplit

_END = b"\r\n\r\n"


class BufferingProxy:
    """A proxy on a port of its own, which passes WebSockets through. Use it as a context.

    Args:
        url: the server's address.

    Attributes:
        url: the address of the same pages behind the proxy.
        unanswered: the requests whose answers the server has not finished, such as ``GET /a/b/api/kernels``.
    """

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self.url = ""
        self.unanswered: list[str] = []
        self._sockets: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()], name="proxy")

    def __enter__(self) -> BufferingProxy:
        self._thread.start()
        assert self._listens.wait(20)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()

    def cut(self) -> int:
        """End all WebSockets, as a proxy does that starts again; returns how many there were."""

        async def abort() -> int:
            cut = list(self._sockets)
            self._sockets.clear()
            for each in cut:
                each.transport.abort()
            return len(cut)

        return asyncio.run_coroutine_threadsafe(abort(), self._loop).result(20)

    def sockets(self) -> int:
        """How many WebSockets there are."""
        return len(self._sockets)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        self.url = urlunsplit(self._server._replace(netloc=f"127.0.0.1:{port}"))
        self._listens.set()
        await self._ended.wait()
        server.close()
        handlers = asyncio.all_tasks() - {asyncio.current_task()}
        for each in handlers:
            each.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                head = await reader.readuntil(_END)
                fields = {
                    name.strip().lower(): value.strip()
                    for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
                }
                if fields.get(b"upgrade", b"").lower() == b"websocket":
                    await self._pass(head, reader, writer)
                else:
                    await self._answer(head, await reader.readexactly(int(fields.get(b"content-length", 0))), writer)
        finally:
            writer.close()

    async def _pass(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(self._server.hostname, self._server.port)
        requests.write(head)
        self._sockets.add(writer)
        ways = [asyncio.ensure_future(_copy(reader, requests)), asyncio.ensure_future(_copy(answers, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._sockets.discard(writer)
            requests.close()
            for each in ways:
                each.cancel()

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        first, *fields = head.removesuffix(_END).split(b"\r\n")
        kept = [line for line in fields if not line.lower().startswith((b"connection:", b"keep-alive:"))]
        answers, requests = await asyncio.open_connection(self._server.hostname, self._server.port)
        request = first.rpartition(b" ")[0].decode()
        self.unanswered.append(request)
        try:
            requests.write(b"\r\n".join([first, *kept, b"Connection: close"]) + _END + body)
            writer.write(await answers.read())  # to the end, which is when the server closes the connection
            await writer.drain()
        finally:
            self.unanswered.remove(request)
            requests.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
