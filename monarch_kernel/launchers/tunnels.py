"""The tunnels of a launcher: one for each worker that it has been asked the way to."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Sequence

from monarch_kernel.launchers.tunnel import CommandWay, Tunnel, TunnelWay


class Tunnels:
    """Tunnels by the URLs of workers, each made when it is first needed."""

    def __init__(self) -> None:
        self._made: dict[str, Tunnel] = {}
        self._lock = threading.Lock()

    def to(self, url: str, command: Sequence[str]) -> str:
        """The URL at this end of the tunnel to a worker, which is made by this command unless it is there."""
        return self.carried(url, functools.partial(CommandWay, list(command)))

    def carried(self, url: str, carry: Callable[[socket.socket], TunnelWay]) -> str:
        """As ``to``, where connections are carried by something else; see ``Tunnel``."""
        with self._lock:
            tunnel = self._made.get(url)
            if tunnel is None:
                tunnel = self._made[url] = Tunnel(carry)
        return f"tcp://127.0.0.1:{tunnel.port}"

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            made, self._made = list(self._made.values()), {}
        for tunnel in made:
            tunnel.close()
