"""One side of links over TCP, in a test's own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch_kernel.protocol.keys import Keys
from monarch_kernel.protocol.messages import ProcStarted, encode
from monarch_kernel.runtime.node.audit import Audit
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.tcp import Listener, TcpLink, dial


def header(name: str, number: int = 0) -> bytes:
    return encode(ProcStarted(name, number))


class Side:
    """One side: a poller of its own, with whatever links and listeners; collects what comes."""

    def __init__(self, keys: Keys, background: bool = True, steady: bool = True) -> None:
        self.keys = keys
        self.steady = steady
        self.poller = Poller(background)
        self.audit = Audit(self.poller)
        self.links: list[TcpLink] = []
        self.listeners: list[Listener] = []
        self.got: list[tuple[TcpLink, str, int, bytes]] = []
        self.ended: list[TcpLink] = []
        self.react: Callable[[TcpLink, Any, Any], None] | None = None
        self._waits: list[tuple[Callable[[], object], Future[None]]] = []

    def _on_message(self, link: TcpLink, message: Any, body: Any) -> None:
        self.got.append((link, message.proc, message.pid, bytes(body)))
        if self.react is not None:
            self.react(link, message, body)
        self._look()

    def _on_close(self, link: TcpLink) -> None:
        self.ended.append(link)
        self._look()

    def _on_link(self, link: TcpLink) -> None:
        self.links.append(link)
        self._look()

    def _look(self) -> None:
        for condition, future in list(self._waits):
            if condition():
                future._resolve(None)

    def wait(self, condition: Callable[[], object], what: str, timeout: float = 20) -> None:
        """Until something is so, looked at whenever something happens here."""
        wait = (condition, Future[None](self.poller, what))
        self._waits.append(wait)
        if not condition():
            wait[1].get(timeout)
        self._waits.remove(wait)

    def listen(self, url: str = "tcp://127.0.0.1:0") -> str:
        listener = Listener(
            self.poller, url, self.keys, self._on_message, self._on_close, self._on_link, self.audit, self.steady
        )
        self.listeners.append(listener)
        return listener.url

    def dial(self, url: str, timeout: float = 20) -> TcpLink:
        link = dial(self.poller, url, self.keys, self._on_message, self._on_close, timeout, self.steady)
        self.links.append(link)
        return link

    def names(self) -> list[str]:
        return [name for _, name, _, _ in self.got]

    def echo(self, link: TcpLink, body: bytes = b"", name: str = "echo") -> None:
        """Send, and wait for the same to come back."""
        before = len(self.got)
        link.send(header(name), body)
        self.wait(lambda: any(got[0] is link and got[3] == body for got in self.got[before:]), "echo")

    def close(self) -> None:
        for link in self.links:
            link.close()
        for listener in self.listeners:
            listener.close()
        self.audit.close()
        self.poller.close()


def assert_true(value: bool) -> None:
    assert value


def echoing(link: TcpLink, message: Any, body: Any) -> None:
    link.send(encode(message), bytes(body))
