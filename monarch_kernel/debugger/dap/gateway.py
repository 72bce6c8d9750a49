"""A door to debugpy in a rank, for any IDE: a port of this machine's loopback interface, open to this user only.

DAP is the right to run code, and has no passwords. So the port is there for as long as the gateway, on the loopback
interface of the controller's machine, and whoever connects must be a process of the same user (or of root), which the
operating system tells. From there on everything goes through the actor runtime, to ranks of this and of any other host.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from typing import Any

from monarch_kernel.actor import ActorError, Channel, SupervisionError
from monarch_kernel.debugger.dap.tunnel import START_TIMEOUT, Begun, DebugpyTunnel

_CHUNK = 65536
_LOOPBACK = "127.0.0.1"
#: How long the rank may take for one step of a connection (seconds).
TIMEOUT = 5.0
# All connections of this machine, with whose they are: see proc(5).
_TCP = "/proc/net/tcp"


class Gateway:
    """debugpy in one rank, at a port here.

    Args:
        mesh: the proc mesh.
        rank: the rank in it.

    Raises:
        RuntimeError: debugpy cannot run there now; the sentence says why.
    """

    def __init__(self, mesh: Any, rank: int) -> None:
        self.mesh: str = mesh.name
        self.rank = rank
        where = mesh.slice(**mesh.extent.point(rank))
        self._tunnel: Any = where.spawn("debugpy", DebugpyTunnel)
        try:
            self.begun: Begun = self._tunnel.begin.call_one().get(START_TIMEOUT + TIMEOUT)
        except TimeoutError:
            raise RuntimeError(
                f"rank {rank} of mesh {mesh.name} did not start debugpy in {START_TIMEOUT + TIMEOUT:.0f} s: it does "
                f"not let go of the interpreter, or is stopped; %mesh stacks --native -r {rank} shows where it is"
            ) from None
        except (ActorError, SupervisionError) as error:
            raise RuntimeError(f"rank {rank} of mesh {mesh.name}: {_reason(error)}") from None
        if self.begun.stops:
            raise RuntimeError(
                f"rank {rank} of mesh {mesh.name} is stopped in the mesh debugger: have it go on, then start debugpy"
            )
        self._lock = threading.Lock()
        self._listener = socket.create_server((_LOOPBACK, 0), backlog=1)
        self._over, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="monarch-debugpy", daemon=True)
        self._thread.start()
        self._tunnel.hold.call_one().add_done_callback(lambda _future: self._end())

    @property
    def address(self) -> tuple[str, int]:
        """Where an IDE connects."""
        host, port = self._listener.getsockname()
        return host, port

    def close(self) -> None:
        """End debugging in the rank, and close the door."""
        self._end()
        self._thread.join(TIMEOUT)
        try:
            self._tunnel.stop().get(TIMEOUT)
        except (TimeoutError, ActorError, SupervisionError):
            pass  # it ends with the rank, at the latest
        with self._lock:
            self._listener.close()
            os.close(self._over)
            os.close(self._wake)
            self._wake = -1

    def _end(self) -> None:
        """Have the thread end; called when the rank is gone, too."""
        with self._lock:
            if self._wake >= 0:
                os.write(self._wake, b"x")

    @property
    def is_open(self) -> bool:
        """Whether it still serves; it ends with the rank."""
        return self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener, self._over], [], [])
            if self._over in ready:
                return
            client, peer = self._listener.accept()
            with client:
                if not belongs_to(peer, self.address, {os.getuid(), 0}):
                    continue
                try:
                    self._carry(client)
                except (TimeoutError, ActorError, SupervisionError):
                    return  # the rank is gone, or as good as gone

    def _carry(self, client: socket.socket) -> None:
        """Carry one client's bytes until either side ends, or the gateway is closed."""
        port, receiver = Channel[bytes].open()
        self._tunnel.connect.call_one(port).get(TIMEOUT)
        ended, end = os.pipe()

        def listen() -> None:
            try:
                while data := receiver.recv().get():
                    client.sendall(data)
            except Exception:  # the rank has died, or the client is gone
                pass
            os.write(end, b"x")

        thread = threading.Thread(target=listen, name="monarch-debugpy-reader", daemon=True)
        thread.start()
        try:
            while True:
                ready, _, _ = select.select([client, ended, self._over], [], [])
                if ended in ready or self._over in ready:
                    break
                data = client.recv(_CHUNK)
                if not data:
                    break
                self._tunnel.write.broadcast(data)
        except OSError:
            pass  # the client is gone
        try:
            self._tunnel.hang_up.call_one().get(TIMEOUT)
        finally:
            port.send(b"")  # the rank, if it is alive, has said this already
            thread.join(TIMEOUT)
            os.close(ended)
            os.close(end)


def belongs_to(peer: tuple[str, int], here: tuple[str, int], users: set[int]) -> bool:
    """Whether the process at the other end of a connection of the loopback interface runs as one of these users."""
    wanted = [_hex(peer), _hex(here)]
    try:
        with open(_TCP) as table:
            next(table)
            for line in table:
                fields = line.split()
                if fields[1:3] == wanted:
                    return int(fields[7]) in users
    except (OSError, StopIteration):
        pass
    return False


def _hex(address: tuple[str, int]) -> str:
    number = int.from_bytes(socket.inet_aton(address[0]), "little")
    return f"{number:08X}:{address[1]:04X}"


def _reason(error: ActorError | SupervisionError) -> str:
    failures = getattr(error, "failures", None) or []
    first = failures[0] if failures else None
    message = getattr(first, "message", "") or getattr(getattr(first, "death", None), "cause", "")
    return str(message or error)
