"""Serve the console to other programs of the same user, through a Unix socket in the run folder.

Only that user can open the socket.

Messages are JSON objects, one per line. A client sends ``{"line": TEXT, "number": N}`` to execute a line, and
``{"complete": TEXT, "number": N}`` to complete one. It receives ``{"text": TEXT}`` for output, and at the end of a line
``{"done": N, "prompt": TEXT, "left": SECONDS or null, "leave": BOOL}``. The answer to a completion is ``{"words":
[...], "number": N}``. If ranks stop that no command of this client has moved, it receives ``{"notice": TEXT, "prompt":
TEXT, "left": ...}``.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from monarch_kernel.debugger.commands.console import Console
from monarch_kernel.debugger.events import RankStopped
from monarch_kernel.private_files import is_ours, peer_of, remove_socket

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hub import MeshDebugger

NAME = "console.sock"
#: Stops within this time of one another are announced together (seconds).
SETTLE = 0.15
_MOST = 1 << 20


class Server:
    """Listens in a run folder.

    Args:
        path: the path of the socket.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        remove_socket(path)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen()
        self._open: set[_Connection] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, name="monarch-console", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not is_ours(peer_of(sock)[1]):
                sock.close()
                continue
            connection = _Connection(sock, self._closed)
            with self._lock:
                self._open.add(connection)
            connection.start()

    def _closed(self, connection: _Connection) -> None:
        with self._lock:
            self._open.discard(connection)

    def close(self) -> None:
        """Close all connections, and stop listening. Stopped ranks stay stopped."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # otherwise accept() would not return
        self._listener.close()
        remove_socket(self.path)
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            connection.hang_up()
        for thread in (self._thread, *(thread for each in connections for thread in each.threads)):
            if thread is not threading.current_thread():
                thread.join(2.0)


class _Connection:
    """The connection of one terminal: one thread reads messages, another executes lines and announces stops."""

    def __init__(self, sock: socket.socket, closed: Any) -> None:
        from monarch_kernel.debugger.controller.hub import get_debugger

        self._sock = sock
        self._closed = closed
        self._debugger: MeshDebugger = get_debugger()
        self._console = Console(self._debugger, self._text, name=f"the terminal of process {peer_of(sock)[0]}")
        self._work: queue.Queue[tuple[str, int] | None] = queue.Queue()
        self._sending = threading.Lock()
        self._unsubscribe = self._debugger.subscribe(self._on_event)
        self.threads = [
            threading.Thread(target=target, name="monarch-console", daemon=True) for target in (self._read, self._run)
        ]

    def start(self) -> None:
        """Start its threads. The first message lists the stopped ranks."""
        for thread in self.threads:
            thread.start()

    def hang_up(self) -> None:
        """Close the connection, from any thread."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    # -- what comes in ----------------------------------------------------------------------------

    def _read(self) -> None:
        rest = b""
        try:
            while data := self._sock.recv(65536):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))
                if len(rest) > _MOST:
                    break
        except (OSError, ValueError):
            pass  # the terminal is gone, or does not follow the protocol
        finally:
            self._work.put(None)

    def _handle(self, message: object) -> None:
        if not isinstance(message, dict):
            raise ValueError("a message is an object")
        number = int(message.get("number", 0))
        if "line" in message:
            self._work.put((str(message["line"]), number))
        elif "complete" in message:
            self._send(words=self._console.complete(str(message["complete"])), number=number)

    def _on_event(self, event: object) -> None:
        if isinstance(event, RankStopped):
            self._work.put(("", -1))

    # -- what goes out ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._console.announce()
            self._done(0, leave=False)
            while (item := self._work.get()) is not None:
                line, number = item
                if number < 0:
                    self._notice()
                    continue
                leave = self._console.run(line)
                self._done(number, leave)
                if leave:
                    break
                self._notice()  # stops that arrived in the meantime
        finally:
            self._unsubscribe()
            self._console.release()
            self._console.close()
            self.hang_up()
            self._sock.close()
            self._closed(self)

    def _done(self, number: int, leave: bool) -> None:
        self._send(done=number, leave=leave, **self._prompt())

    def _notice(self) -> None:
        """Announce stops that no command of this terminal has caused, once no further ones follow."""
        after: tuple[str, int] | None = ("", -1)
        if self._console.has_news():
            with suppress(queue.Empty):
                while (after := self._work.get(timeout=SETTLE)) is not None and after[1] < 0:
                    pass
            text = self._console.news()
            if text:
                self._send(notice=text, **self._prompt())
        if after is None or after[1] >= 0:
            self._work.put(after)

    def _prompt(self) -> dict[str, Any]:
        prompt, left = self._console.prompt_parts()
        return {"prompt": prompt, "left": left}

    def _text(self, text: str) -> None:
        self._send(text=text)

    def _send(self, **message: object) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._sending, suppress(OSError):  # the reader detects that the terminal is gone
            self._sock.sendall(data)


_server: Server | None = None
_lock = threading.Lock()


def listen(folder: str) -> str:
    """Listen in a run folder, unless this process already listens. Return the path of the socket.

    Raises:
        OSError: the socket cannot be created.
    """
    global _server
    with _lock:
        if _server is None:
            _server = Server(os.path.join(folder, NAME))
        return _server.path


def close() -> None:
    """Stop listening; called when the runtime of this process ends."""
    global _server
    with _lock:
        server, _server = _server, None
    if server is not None:
        server.close()
