"""A person on the path: passes the records of one connection on, or does something to one of them."""

from __future__ import annotations

import socket
import threading

ACTS = ("flip", "drop", "repeat", "swap", "reflect", "cut")


class Path:
    """Between clients and a listener, on this machine.

    ``act(what, towards)`` does something to the next record in one direction: flips a bit in it, drops it, repeats it,
    swaps it with the one behind it, sends it back to where it came from, or ends the connection in the middle of it.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._acts: dict[str, str] = {}
        #: What passed, by direction.
        self.seen: dict[str, list[bytes]] = {"listener": [], "client": []}
        self.done = threading.Event()
        self._start(self._accept)

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self._server.getsockname()[1]}"

    def act(self, what: str, towards: str) -> None:
        self.done.clear()
        self._acts[towards] = what

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join()
        for sock in (self._server, *self._sockets):
            sock.close()

    def _start(self, work: object, *args: object) -> None:
        assert callable(work)
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            listener = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, listener]
            self._start(self._pass_on, client, listener, "listener")
            self._start(self._pass_on, listener, client, "client")

    def _pass_on(self, source: socket.socket, target: socket.socket, towards: str) -> None:
        held = b""
        try:
            while (data := _record(source)) is not None:
                self.seen[towards].append(data)
                what = self._acts.get(towards, "") if data[0] == 23 else ""
                if what == "swap" and not held:
                    held = data
                    continue
                if what:
                    del self._acts[towards]
                if what == "flip":
                    data = data[:-1] + bytes([data[-1] ^ 1])
                elif what == "repeat":
                    data += data
                elif what == "swap":
                    data += held
                elif what == "cut":
                    data = data[: len(data) // 2]
                if what == "reflect":
                    source.sendall(data)
                elif what != "drop":
                    target.sendall(data)
                if what:
                    self.done.set()
                if what == "cut":
                    break
        except OSError:
            pass
        for sock in (source, target):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def _record(sock: socket.socket) -> bytes | None:
    head = _exactly(sock, 5)
    if head is None:
        return None
    body = _exactly(sock, int.from_bytes(head[3:5], "big"))
    return None if body is None else head + body


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            return None
        data += more
    return data
