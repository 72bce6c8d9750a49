"""A TCP port of a host, at a port of this machine.

An actor there makes the connections, and each piece of their bytes is an argument or a result of its endpoints, so the
way is the one of all messages. A few pieces of each direction are under way at any time: a side that does not read
slows down the other, as with any connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from monarch_kernel.actor import Actor, ActorMesh, Future, HostMesh, concurrent_endpoint
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.private_files import is_own

LOOPBACK = "127.0.0.1"
#: So many bytes in one message, and so many messages of each direction of a connection under way.
_PIECE, _WINDOW = 256 * 2**10, 4
#: How long a server may take to accept a connection (seconds).
_DIAL_TIME = 10.0


@dataclass
class _Stream:
    """A connection of a host to its port. Its locks are taken in the order of the calls."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Dialer(Actor):
    """Connects to ports of its host."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._made = 0

    @concurrent_endpoint
    async def dial(self, port: int) -> int | str:
        """Connect to a port of the loopback interface: the number of the connection, or why there is none."""
        refused = ""
        for address in (LOOPBACK, "::1"):
            try:
                async with asyncio.timeout(_DIAL_TIME):
                    reader, writer = await asyncio.open_connection(address, port)
            except (OSError, TimeoutError) as e:
                refused = refused or (os.strerror(e.errno) if e.errno else "it does not answer")
                continue
            self._made += 1
            self._streams[self._made] = _Stream(reader, writer)
            return self._made
        return refused

    @concurrent_endpoint
    async def read(self, number: int) -> bytes | None:
        """What comes next; b"": its end; None: the connection was lost."""
        stream = self._streams.get(number)
        if stream is None:
            return None
        async with stream.reading:
            try:
                return await stream.reader.read(_PIECE)
            except OSError:
                return None

    @concurrent_endpoint
    async def write(self, number: int, data: bytes) -> bool:
        """Send bytes, or, with none, the end of this direction. Returns whether the connection still takes some."""
        stream = self._streams.get(number)
        if stream is None:
            return False
        async with stream.writing:
            try:
                if data:
                    stream.writer.write(data)
                    await stream.writer.drain()
                else:
                    stream.writer.write_eof()
            except OSError:
                return False
            return True

    @concurrent_endpoint
    async def close(self, number: int) -> None:
        """End a connection; what was not sent yet is dropped, unless both directions had ended."""
        stream = self._streams.pop(number, None)
        if stream is not None:
            if stream.reader.at_eof():
                stream.writer.close()
            else:
                _reset(stream.writer)

    @concurrent_endpoint
    async def stay(self) -> None:
        """Never returns: fails when this process is lost."""
        await asyncio.get_running_loop().create_future()


class PortForward:
    """Brings a port of a host here, to this user alone.

    Args:
        hosts: a mesh with the dimension ``hosts``.
        host: the number of the one with the port.
        port: the port there.
        local: the port here, on the loopback interface; 0: any.
    """

    def __init__(self, hosts: HostMesh, host: int, port: int, local: int) -> None:
        self._hosts = hosts
        self._where = f"port {port} of host {host}"
        self._host = host
        self._port = port
        self._local = local
        self._connections: set[asyncio.Task[None]] = set()

    def run(self, listening: Callable[[int], None]) -> None:
        """Serve until SIGINT or SIGTERM.

        Args:
            listening: called with the port here once it takes connections.

        Raises:
            LaunchError: nothing listens at the port there, or the port here is taken.
            SupervisionError: the host, or the process at it, was lost.
        """
        procs = self._hosts.slice(hosts=slice(self._host, self._host + 1)).spawn_procs(name="forward")
        try:
            dialer = procs.spawn("dialer", _Dialer)
            asyncio.run(self._serve(dialer, listening))
        finally:
            procs.stop("the port is no longer forwarded").get()

    async def _serve(self, dialer: ActorMesh[_Dialer], listening: Callable[[int], None]) -> None:
        first = await dialer.dial.call_one(self._port)
        if isinstance(first, str):
            raise LaunchError(f"nothing listens at {self._where} ({first}): start the server there first")
        await dialer.close.call_one(first)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            try:
                await self._connect(dialer, reader, writer)
            finally:
                self._connections.discard(task)

        try:
            server = await asyncio.start_server(accept, LOOPBACK, self._local, limit=_PIECE)
        except OSError as e:
            raise LaunchError(
                f"port {self._local} cannot be had here ({os.strerror(e.errno or 0)}): {self._port}:0 takes any"
            ) from None
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        listening(server.sockets[0].getsockname()[1])
        waits = [dialer.stay.call_one().as_asyncio(), asyncio.ensure_future(ended.wait())]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            server.close()
            for each in (*waits, *self._connections):
                each.cancel()
            await asyncio.gather(*waits, *self._connections, return_exceptions=True)

    async def _connect(
        self, dialer: ActorMesh[_Dialer], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry one connection, from its first byte to its end."""
        if not is_own(writer.get_extra_info("socket")):
            _reset(writer)
            return
        number = await dialer.dial.call_one(self._port)
        if isinstance(number, str):
            print(f"monarch-kernel: {self._where} refused a connection: {number}", file=sys.stderr)
            _reset(writer)
            return
        whole = False
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_carry_there(dialer, number, reader))
                both.create_task(_carry_here(dialer, number, writer))
            whole = True
        except* OSError:  # one side has broken it off, so the other side gets to know
            pass
        finally:
            with contextlib.suppress(OSError):
                if whole:
                    writer.close()
                    await writer.wait_closed()
                else:
                    _reset(writer)
            dialer.close.call_one(number)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection off, so that its peer does not take what it has got for all."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _carry_there(dialer: ActorMesh[_Dialer], number: int, reader: asyncio.StreamReader) -> None:
    """Send there what comes here, to its end."""
    writes: deque[Future[bool]] = deque()
    data = b"x"
    while data:
        data = await reader.read(_PIECE)
        writes.append(dialer.write.call_one(number, data))
        while writes and (not data or len(writes) == _WINDOW):
            if not await writes.popleft():
                raise ConnectionResetError


async def _carry_here(dialer: ActorMesh[_Dialer], number: int, writer: asyncio.StreamWriter) -> None:
    """Send here what comes there, to its end."""
    reads = deque(dialer.read.call_one(number) for _ in range(_WINDOW))
    while data := await reads.popleft():
        reads.append(dialer.read.call_one(number))
        writer.write(data)
        await writer.drain()
    if data is None:
        raise ConnectionResetError
    writer.write_eof()
