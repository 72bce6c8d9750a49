"""Give any IDE access to debugpy in a rank, through a port of the loopback interface that is open to this user only.

DAP grants the right to run code, and has no passwords. A port of the loopback interface is open to every user of the
machine, and the owner of a connection cannot be determined reliably. Therefore a client must send a token: the printed
launch configuration contains it, and IDEs send the configuration as arguments of the request ``attach``. Nothing that
the client sends before reaches the rank; the gateway itself answers ``initialize``, which comes first. In addition, the
gateway immediately closes connections of other users, as reported by the operating system. Other connections do not
affect a session. The gateway forwards all data through the actor runtime, to ranks on any host.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from monarch_kernel.actor import ActorError, ActorMesh, Channel, ProcMesh, SupervisionError
from monarch_kernel.debugger.dap.messages import Frames, content, frame
from monarch_kernel.debugger.rank.debugpy_tunnel import START_TIMEOUT, DebugpyProcess, DebugpyTunnel
from monarch_kernel.engines import tool_runtime
from monarch_kernel.engines.interface import NotOffered
from monarch_kernel.private_files import is_own

_CHUNK = 65536
_LOOPBACK = "127.0.0.1"
#: The time limit for the rank to complete one step of a connection (seconds).
TIMEOUT = 5.0
#: Limits for clients that have not sent the token: how long each may take (seconds), how many may be connected at a
#: time, and how many bytes each may send.
TOKEN_TIMEOUT = 20.0
MOST_UNKNOWN = 8
_MOST_BYTES = 256 * 1024
#: How long a client waits for the previous session to end (seconds).
HANDOVER = 5.0
#: How long the gateway waits after a client could not be accepted (seconds).
ACCEPT_PAUSE = 0.1
#: The property of a launch configuration that holds the token.
TOKEN = "token"
# The number of the request that repeats the client's own to debugpy; no IDE uses it.
_REPLAYED = 2**30


class Gateway:
    """Serves debugpy of one rank at a port of this machine.

    Args:
        mesh: the proc mesh.
        rank: the rank in the mesh.

    Raises:
        RuntimeError: debugpy cannot run there now; the message gives the reason.
    """

    def __init__(self, mesh: ProcMesh, rank: int) -> None:
        if "debugpy" not in tool_runtime().OFFERS:
            raise NotOffered(
                f"the engine {tool_runtime().NAME} connects no IDE to ranks; use %mesh break and %mesh debug"
            )
        self.mesh = mesh.name
        self.rank = rank
        #: The value that a client must send as ``token`` in its request ``attach``.
        self.token = secrets.token_urlsafe(16)
        where = mesh.slice(**mesh.extent.point(rank))
        self._tunnel: ActorMesh[DebugpyTunnel] = where.spawn("debugpy", DebugpyTunnel)
        try:
            self.begun: DebugpyProcess = self._tunnel.begin.call_one().get(START_TIMEOUT + TIMEOUT)
        except TimeoutError:
            raise RuntimeError(
                f"rank {rank} of mesh {mesh.name} did not start debugpy in {START_TIMEOUT + TIMEOUT:.0f} s: it holds "
                f"the interpreter lock, or is stopped; %mesh stacks --native -r {rank} shows where it is"
            ) from None
        except (ActorError, SupervisionError) as error:
            raise RuntimeError(f"rank {rank} of mesh {mesh.name}: {_reason(error)}") from None
        if self.begun.stops:
            raise RuntimeError(
                f"rank {rank} of mesh {mesh.name} is stopped in the mesh debugger: continue it, then start debugpy"
            )
        self._lock = threading.Lock()
        self._session = threading.Lock()  # held for the client whose bytes are forwarded
        self._unknown: list[socket.socket] = []  # the clients that have not sent the token yet, oldest first
        self._threads: set[threading.Thread] = set()
        self._listener = socket.create_server((_LOOPBACK, 0), backlog=128)
        self._over, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="monarch-debugpy", daemon=True)
        self._thread.start()
        self._tunnel.hold.call_one().add_done_callback(lambda _future: self._end())

    @property
    def address(self) -> tuple[str, int]:
        """The address to which an IDE connects."""
        host, port = self._listener.getsockname()
        return host, port

    def close(self) -> None:
        """End debugging in the rank, and close the port."""
        self._end()
        self._thread.join(TIMEOUT)
        for thread in list(self._threads):
            thread.join(TIMEOUT)
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
        """End the threads. Also called when the rank is gone."""
        with self._lock:
            if self._wake >= 0:
                os.write(self._wake, b"x")

    @property
    def is_open(self) -> bool:
        """Whether the gateway still serves clients. It ends with the rank."""
        return self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            if self._over in _readable(self._listener.fileno(), self._over):
                return
            try:
                client, _ = self._listener.accept()
            except OSError:  # the client has already disconnected, or this process has too many open files
                if self._over in _readable(self._over, timeout=ACCEPT_PAUSE):
                    return
                continue
            if not is_own(client):
                client.close()
                continue
            with self._lock:
                self._unknown.append(client)
                if len(self._unknown) > MOST_UNKNOWN:
                    with suppress(OSError):
                        self._unknown.pop(0).shutdown(socket.SHUT_RDWR)  # its thread closes it
                thread = threading.Thread(target=self._handle, args=(client,), name="monarch-debugpy", daemon=True)
                self._threads.add(thread)
            thread.start()

    def _handle(self, client: socket.socket) -> None:
        """Serve one client, from its first byte to its end."""
        try:
            with client:
                greeted = _Handshake(client, self._over, self.token, self.begun.capabilities).run()
                with self._lock:
                    if client in self._unknown:
                        self._unknown.remove(client)
                if greeted is None:
                    return
                if not self._session.acquire(timeout=HANDOVER):
                    greeted.refuse("another client debugs this rank: end its session first")
                    return
                try:
                    self._carry(client, greeted)
                finally:
                    self._session.release()
        except (TimeoutError, ActorError, SupervisionError):
            self._end()  # the rank is gone, or does not answer
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _carry(self, client: socket.socket, greeted: _Handshake) -> None:
        """Forward one client's bytes until either side ends, or the gateway is closed."""
        port, receiver = Channel[bytes].open()
        self._tunnel.connect.call_one(port).get(TIMEOUT)
        ended, end = os.pipe()

        def listen() -> None:
            try:
                while data := receiver.recv().get():
                    if not greeted.is_replay(data):
                        client.sendall(data)
            except Exception:  # the rank has died, or the client is gone
                pass
            os.write(end, b"x")

        thread = threading.Thread(target=listen, name="monarch-debugpy-reader", daemon=True)
        thread.start()
        try:
            self._tunnel.write.broadcast(greeted.requests)
            while True:
                ready = _readable(client.fileno(), ended, self._over)
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
            port.send(b"")  # the rank, if it is alive, has already sent this
            thread.join(TIMEOUT)
            os.close(ended)
            os.close(end)


class _Handshake:
    """The exchange with a client until it has sent the token.

    Args:
        client: the connection.
        over: a descriptor that becomes readable when the gateway ends.
        token: the token that the client must send.
        capabilities: debugpy's answer to ``initialize``.
    """

    def __init__(self, client: socket.socket, over: int, token: str, capabilities: dict[str, object]) -> None:
        self._client = client
        self._over = over
        self._token = token
        self._capabilities = capabilities
        self._attach: dict[str, Any] = {}
        #: The client's requests to forward to debugpy now, without the token.
        self.requests = b""

    def run(self) -> _Handshake | None:
        """Exchange messages until the client has sent the token. Return None if it did not send it, or is gone."""
        try:
            return self if self._run() else None
        except (OSError, ValueError, TypeError, RecursionError):
            return None  # it is gone, or speaks another protocol

    def _run(self) -> bool:
        end = time.monotonic() + TOKEN_TIMEOUT
        frames = Frames()
        size = 0
        while (left := end - time.monotonic()) > 0:
            ready = _readable(self._client.fileno(), self._over, timeout=left)
            if not ready or self._over in ready:
                return False
            data = self._client.recv(_CHUNK)
            size += len(data)
            if not data or size > _MOST_BYTES:
                return False
            messages = frames.feed(data)
            for number, message in enumerate(messages):
                if not self._take(content(message)):
                    return False
                if self._attach:
                    # No client sends anything before it receives the answer to this request; if one does, that data
                    # follows it.
                    self.requests += b"".join(messages[number + 1 :]) + frames.rest
                    return True
        return False

    def _take(self, request: dict[str, object]) -> bool:
        """Handle one request. Return whether the client may continue."""
        arguments = request.get("arguments")
        arguments = dict(arguments) if isinstance(arguments, dict) else {}
        command = request.get("command")
        if command == "initialize":
            self._answer(request, success=True, body=self._capabilities)
            self.requests = frame({**request, "seq": _REPLAYED, "arguments": arguments})
            return True
        given = arguments.pop(TOKEN, None)
        self._attach = request
        if command == "attach" and isinstance(given, str) and hmac.compare_digest(given.encode(), self._token.encode()):
            self.requests += frame({**request, "arguments": arguments})
            return True
        self.refuse(
            f'give the token that %mesh debugpy has printed, as the property "{TOKEN}" of the launch configuration '
            "(of the request attach, which comes first after initialize)"
        )
        return False

    def refuse(self, why: str) -> None:
        """Answer the request ``attach`` with a failure."""
        error = {"id": 1, "format": why, "showUser": True}
        self._answer(self._attach, success=False, message=why, body={"error": error})

    def _answer(self, request: dict[str, object], **fields: object) -> None:
        answer = {"type": "response", "seq": 0, "request_seq": request.get("seq"), "command": request.get("command")}
        try:
            self._client.sendall(frame({**answer, **fields}))
        except OSError:
            pass  # it is gone, as the next read will show

    def is_replay(self, message: bytes) -> bool:
        """Return whether this is debugpy's answer to a request that the gateway has already answered."""
        return b'"initialize"' in message and content(message).get("request_seq") == _REPLAYED


def _readable(*fds: int, timeout: float | None = None) -> list[int]:
    """Wait until some of these descriptors are readable. (``select`` does not accept descriptors above 1,023.)"""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)]


def _reason(error: ActorError | SupervisionError) -> str:
    failures = getattr(error, "failures", None) or []
    first = failures[0] if failures else None
    message = getattr(first, "message", "") or getattr(getattr(first, "death", None), "cause", "")
    return str(message or error)
