"""Make a TCP port of a host available at a port of this machine.

An actor on the host opens the connections. Each piece of their data is an argument or a result of its endpoints, so it
takes the same route as all messages. A few pieces of each direction are in flight at any time. A side that does not
read therefore slows down the other, as with any connection.
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

from monarch_kernel.actor import (
    Actor,
    ActorError,
    ActorMesh,
    Future,
    HostMesh,
    Point,
    ProcMesh,
    concurrent_endpoint,
    current_rank,
    endpoint,
)
from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.private_files import is_own

LOOPBACK = "127.0.0.1"
#: The maximum number of bytes in one message, and of messages in flight per direction of a connection.
_PIECE, _WINDOW = 256 * 2**10, 4
#: The time limit for a server to accept a connection (seconds).
_DIAL_TIME = 10.0


@dataclass
class _Stream:
    """A connection of a host to its port. Its locks are acquired in the order of the calls."""

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
        """Connect to a port of the loopback interface. Return the number of the connection, or why there is none."""
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
        """Read the next data; b"": the end of the stream; None: the connection was lost."""
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
        """Send bytes, or, if empty, the end of this direction. Return whether the connection still accepts data."""
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
        """End a connection. Unsent data is dropped, unless both directions had ended."""
        stream = self._streams.pop(number, None)
        if stream is not None:
            if stream.reader.at_eof():
                stream.writer.close()
            else:
                _reset(stream.writer)

    @concurrent_endpoint
    async def stay(self) -> None:
        """Never return. The call fails when this process is lost."""
        await asyncio.get_running_loop().create_future()


class _Listener:
    """Accepts connections at a port of this machine, for a port of another.

    Args:
        dialer: opens the connections there.
        port: the port there.
        where: its description, for messages.
    """

    def __init__(self, dialer: ActorMesh[_Dialer], port: int, where: str) -> None:
        self._dialer = dialer
        self._port = port
        self._where = where
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, local: int) -> int:
        """Accept connections at a port of the loopback interface, or at any (0). Return the port.

        Raises:
            LaunchError: the port is in use.
        """
        try:
            self._server = await asyncio.start_server(self._accept, LOOPBACK, local, limit=_PIECE)
        except OSError as e:
            raise LaunchError(
                f"port {local} cannot be had here ({os.strerror(e.errno or 0)}): {self._port}:0 takes any"
            ) from None
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Accept no more connections, and reset existing ones."""
        if self._server is not None:
            self._server.close()
        for each in self._connections:
            each.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._connect(reader, writer)
        except asyncio.CancelledError:  # cancelled by close(); asyncio would report a cancelled task as an error
            pass
        finally:
            self._connections.discard(task)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection, from its first byte to its end."""
        dialer = self._dialer
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
        except* OSError:  # one side has reset the connection, so reset the other side, too
            pass
        finally:
            with contextlib.suppress(OSError):
                if whole:
                    writer.close()
                    await writer.wait_closed()
                else:
                    _reset(writer)
            dialer.close.call_one(number)


class PortForward:
    """Makes a port of a host available on this machine, to this user only.

    Args:
        hosts: a mesh with the dimension ``hosts``.
        host: the number of the host with the port.
        port: the port on the host.
        local: the port of this machine, on the loopback interface; 0: any.
    """

    def __init__(self, hosts: HostMesh, host: int, port: int, local: int) -> None:
        self._hosts = hosts
        self._where = f"port {port} of host {host}"
        self._host = host
        self._port = port
        self._local = local

    def run(self, listening: Callable[[int], None]) -> None:
        """Serve until SIGINT or SIGTERM.

        Args:
            listening: called with the local port once it accepts connections.

        Raises:
            LaunchError: nothing listens at the port of the host, or the local port is in use.
            SupervisionError: the host, or the process on it, was lost.
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
        listener = _Listener(dialer, self._port, self._where)
        local = await listener.listen(self._local)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        listening(local)
        waits = [dialer.stay.call_one().as_asyncio(), asyncio.ensure_future(ended.wait())]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            await listener.close()
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


class _Source(Actor):
    """Listens on its host for a port of the rank of another mesh with the same coordinates."""

    @concurrent_endpoint
    async def listen(
        self, dialers: ActorMesh[_Dialer], port: int | Callable[[Point], int], address: str | Callable[[Point], str]
    ) -> None:
        """Start to accept connections."""
        point = current_rank()
        there = _checked_port("dst_port", port(point) if callable(port) else port)
        local = _checked_address(address(point) if callable(address) else address)
        dialer = dialers.slice(**{label: point[label] for label in point})
        self._listener = _Listener(dialer, there, f"port {there} of {dict(point)}")
        await self._listener.listen(local)

    async def __cleanup__(self, exc: Exception | None) -> None:
        if hasattr(self, "_listener"):
            await self._listener.close()


class PortForwarder(Actor):
    """Forwards ports of ranks to ports of others until it is stopped. Spawn it on ``this_proc()``."""

    @endpoint
    async def forward(
        self,
        dst_proc_mesh: ProcMesh,
        dst_port: int | Callable[[Point], int],
        src_proc_mesh: ProcMesh,
        src_address: str | Callable[[Point], str],
    ) -> None:
        """Let each rank of a mesh accept connections for the rank of another mesh with the same coordinates.

        Args:
            dst_proc_mesh: the mesh whose hosts have the servers, on their loopback interfaces.
            dst_port: the port of the servers, or a function that returns it for a point.
            src_proc_mesh: the mesh that accepts connections, only of this user; it has the same shape.
            src_address: the address at which it accepts them, such as ``127.0.0.1:8080``, or a function that returns it
                for a point.

        Raises:
            ValueError: the shapes differ, a port is invalid, or the address is not on the loopback interface.
            ActorError: a port is in use, or the result of a function is invalid.
        """
        if dst_proc_mesh.extent != src_proc_mesh.extent:
            shapes = f"{dict(dst_proc_mesh.sizes)} and {dict(src_proc_mesh.sizes)}"
            raise ValueError(f"ports are forwarded between meshes of one shape, and these have {shapes}")
        if not callable(dst_port):
            _checked_port("dst_port", dst_port)
        if not callable(src_address):
            _checked_address(src_address)
        dialers = dst_proc_mesh.spawn("dialer", _Dialer)
        sources = src_proc_mesh.spawn("source", _Source)
        try:
            await sources.listen.call(dialers, dst_port, src_address)
        except ActorError:
            await sources.stop("a port cannot be forwarded")
            raise


def _checked_port(what: str, port: int) -> int:
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port < 2**16:
        raise ValueError(f"{what} must be an integer from 1 through 65535, not {port!r}")
    return port


def _checked_address(address: str) -> int:
    """Return the port of an address of the loopback interface."""
    host, _, port = address.rpartition(":")
    if host not in (LOOPBACK, "localhost"):
        raise ValueError(
            f"ports are forwarded to this user alone, at the loopback interface: write {LOOPBACK}:8080, not {address!r}"
        )
    return _checked_port("src_address port", int(port) if port.isdecimal() else -1)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Reset a connection, so that its peer does not consider the received data complete."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _carry_there(dialer: ActorMesh[_Dialer], number: int, reader: asyncio.StreamReader) -> None:
    """Send local data to the host, up to its end."""
    writes: deque[Future[bool]] = deque()
    data = b"x"
    while data:
        data = await reader.read(_PIECE)
        writes.append(dialer.write.call_one(number, data))
        while writes and (not data or len(writes) == _WINDOW):
            if not await writes.popleft():
                raise ConnectionResetError


async def _carry_here(dialer: ActorMesh[_Dialer], number: int, writer: asyncio.StreamWriter) -> None:
    """Send data from the host to the local connection, up to its end."""
    reads = deque(dialer.read.call_one(number) for _ in range(_WINDOW))
    while data := await reads.popleft():
        reads.append(dialer.read.call_one(number))
        writer.write(data)
        await writer.drain()
    if data is None:
        raise ConnectionResetError
    writer.write_eof()
