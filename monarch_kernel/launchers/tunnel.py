"""Forward ports of this machine to workers that it cannot reach directly."""

from __future__ import annotations

import functools
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from monarch_kernel import programs
from monarch_kernel.private_files import is_own

#: The maximum number of parallel connections of one tunnel. Each may be a process. A worker has a few.
MOST = 64
#: The pause after a connection could not be accepted because this process has no free descriptor (seconds).
_PAUSE = 0.2


def reaches(url: str, seconds: float) -> bool:
    """Return whether a worker needs no tunnel: a server at a URL (``tcp://HOST:PORT``) accepts connections in time."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except OSError:
        return False
    return True


class TunnelWay(Protocol):
    """Forwards one connection."""

    def over(self) -> bool:
        """Whether the connection has ended."""
        ...

    def end(self) -> None:
        """End the connection."""
        ...

    def wait(self) -> None:
        """Wait until it has ended."""
        ...


class Tunnel:
    """Listens on a port of the loopback address, and forwards each connection of this user.

    The connection itself encrypts and authenticates the data at both ends, as on any other route.

    Args:
        carry: starts to forward a connection, without waiting for the other end. Its socket is closed when it returns,
            so it must keep a duplicate. An ``OSError`` closes the connection, and the connecting side sees that.
    """

    def __init__(self, carry: Callable[[socket.socket], TunnelWay]) -> None:
        self._carry = carry
        self._listener = socket.create_server(("127.0.0.1", 0))
        #: The port to connect to.
        self.port: int = self._listener.getsockname()[1]
        self._ways: list[TunnelWay] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="tunnel", daemon=True).start()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it was closed, or this process has too many open files
                self._closed.wait(_PAUSE)
                continue
            with connection:
                if is_own(connection):
                    self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        with self._lock:
            self._ways = [way for way in self._ways if not way.over()]
            if self._closed.is_set() or len(self._ways) >= MOST:
                return
            with suppress(OSError):
                self._ways.append(self._carry(connection))

    def close(self) -> None:
        """End all connections, and accept no more."""
        with self._lock:
            self._closed.set()
            ways, self._ways = self._ways, []
        self._listener.shutdown(socket.SHUT_RDWR)  # ends accept(), which closing would not
        self._listener.close()
        for way in ways:
            way.end()
        for way in ways:
            way.wait()


class CommandWay:
    """A command whose standard streams are a connection, such as ``ssh -W``.

    Args:
        command: copies between its standard streams and the worker.
    """

    def __init__(self, command: Sequence[str], connection: socket.socket) -> None:
        self._process = programs.start(
            command,
            stdin=connection.fileno(),
            stdout=connection.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the program
        )

    def over(self) -> bool:
        """See ``TunnelWay``."""
        return self._process.poll() is not None

    def end(self) -> None:
        """See ``TunnelWay``."""
        self._process.terminate()

    def wait(self) -> None:
        """See ``TunnelWay``."""
        self._process.wait()


class Tunnels:
    """The tunnels of a launcher, by the URLs of workers. Each is created when it is first needed."""

    def __init__(self) -> None:
        self._made: dict[str, Tunnel] = {}
        self._lock = threading.Lock()

    def to(self, url: str, command: Sequence[str]) -> str:
        """Return the local URL of the tunnel to a worker. The command creates the tunnel if it does not exist."""
        return self.carried(url, functools.partial(CommandWay, list(command)))

    def carried(self, url: str, carry: Callable[[socket.socket], TunnelWay]) -> str:
        """Return the local URL of a tunnel whose connections ``carry`` forwards; see ``Tunnel``."""
        with self._lock:
            tunnel = self._made.get(url)
            if tunnel is None:
                tunnel = self._made[url] = Tunnel(carry)
        return f"tcp://127.0.0.1:{tunnel.port}"

    def close(self) -> None:
        """End all tunnels."""
        with self._lock:
            made, self._made = list(self._made.values()), {}
        for tunnel in made:
            tunnel.close()
