"""An IDE: a client that speaks DAP over a socket."""

from __future__ import annotations

import socket
from typing import Any

from monarch_kernel.debugger.dap.messages import Frames, content, frame
from tests.waiting import patience

PATIENCE = patience(15.0)


class Ide:
    """Connects, and sends one request after the other."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, PATIENCE)
        self._frames = Frames()
        self._seq = 0
        self._come: list[dict[str, Any]] = []

    def send(self, command: str, **arguments: Any) -> int:
        self._seq += 1
        request = {"type": "request", "seq": self._seq, "command": command, "arguments": arguments}
        self._socket.sendall(frame(request))
        return self._seq

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The body of the reply, which must be a success."""
        return self.reply(self.send(command, **arguments))

    def reply(self, seq: int) -> dict[str, Any]:
        reply = self._take(lambda each: each["type"] == "response" and each["request_seq"] == seq)
        assert reply["success"], reply
        return dict(reply.get("body") or {})

    def refused(self, seq: int) -> dict[str, Any]:
        """The reply, which must be a failure."""
        reply = self._take(lambda each: each["type"] == "response" and each["request_seq"] == seq)
        assert not reply["success"], reply
        return reply

    def event(self, name: str) -> dict[str, Any]:
        """The body of the next event of that name."""
        return dict(self._take(lambda each: each["type"] == "event" and each["event"] == name).get("body") or {})

    def _take(self, wanted: Any) -> dict[str, Any]:
        while True:
            for each in self._come:
                if wanted(each):
                    self._come.remove(each)
                    return each
            data = self._socket.recv(65536)
            assert data, f"the connection has ended; so far: {self._come}"
            self._come += [content(message) for message in self._frames.feed(data)]

    def ended(self) -> bool:
        """Wait for the other side to hang up."""
        while self._socket.recv(65536):
            pass
        return True

    def close(self) -> None:
        self._socket.close()
