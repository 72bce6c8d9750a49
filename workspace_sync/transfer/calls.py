"""Send requests to agents, return their answers in order of arrival, and detect agents that do not answer."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.actor import Future, SupervisionError
from workspace_sync.transfer.host_work import AgentLink
from workspace_sync.transfer.messages import Failed

#: An agent that owes an answer is pinged after this long without a sign of life (seconds).
QUIET = 2.0
#: An agent that does not answer this ping counts as lost after this time (seconds).
PATIENCE = 15.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a host.

    Attributes:
        host: its key.
        about: the tag that the caller gave the request.
        value: the answer, or ``Failed``.
        lost: whether the host is lost; ``value`` then has the reason.
    """

    host: str
    about: Any
    value: Any
    lost: bool = False


@dataclass(slots=True)
class _Line:
    """State of one agent.

    Attributes:
        open: pending requests, oldest first.
        heard: the time of its last answer.
        pinged: the time of a pending ping; 0: none.
        gone: why it is lost.
    """

    link: AgentLink
    open: dict[int, Future[object]] = field(default_factory=dict[int, Future[object]])
    heard: float = 0.0
    pinged: float = 0.0
    gone: str = ""


@dataclass(frozen=True, slots=True)
class _Event:
    """An answer (``future``) to the request ``number``, or news from a thread of the client."""

    host: str
    number: int
    about: Any
    future: Future[Any] | None
    value: Any = None


#: The request number of a ping.
_PING = 0


class Calls:
    """Requests of one client to some agents. Used by one thread.

    Args:
        links: the agents.
        patience: the longest time that an agent may be silent (seconds).
    """

    def __init__(self, links: list[AgentLink], patience: float = PATIENCE) -> None:
        self._lines = {link.host.key: _Line(link) for link in links}
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._patience = patience
        self._number = _PING

    @property
    def hosts(self) -> list[str]:
        """The agents that are not lost."""
        return [host for host, line in self._lines.items() if not line.gone]

    def renew(self, link: AgentLink) -> None:
        """Replace the agent of a host."""
        self._lines[link.host.key] = _Line(link)

    def ask(self, host: str, about: object, request: str, *args: object) -> None:
        """Send a request; ``next`` returns its answer. A request to a lost host gets no answer."""
        line = self._lines[host]
        if line.gone:
            return
        if not line.open:
            line.heard = time.monotonic()
        self._number += 1
        line.open[self._number] = self._send(host, self._number, about, request, args)

    def tell(self, host: str, request: str, *args: Any) -> None:
        """Send a request whose answer is ignored."""
        line = self._lines[host]
        if not line.gone:
            line.link.actor.work.call_one(request, *args)

    def post(self, about: object, value: object) -> None:
        """Queue a report from another thread of the client; ``next`` returns it with the host ""."""
        self._events.put(_Event("", _PING, about, None, value))

    def owes(self, host: str) -> bool:
        """Return whether a host owes an answer."""
        return bool(self._lines[host].open)

    def forget(self) -> None:
        """Drop all pending answers."""
        for line in self._lines.values():
            line.open.clear()
        while not self._events.empty():
            self._events.get()

    def gather(self, request: str, *args: object, hosts: Iterable[str] | None = None) -> dict[str, Answer]:
        """Send one request to all hosts, and wait for all answers."""
        asked = [host for host in (self.hosts if hosts is None else hosts) if not self._lines[host].gone]
        for host in asked:
            self.ask(host, request, request, *args)
        return self.answers(request, asked)

    def answers(self, about: object, hosts: Iterable[str]) -> dict[str, Answer]:
        """Wait until hosts have answered their requests."""
        left = set(hosts)
        found: dict[str, Answer] = {}
        while left:
            answer = self.next(1.0, lead=True)
            if answer is not None and answer.host in left and (answer.lost or answer.about == about):
                left.discard(answer.host)
                found[answer.host] = answer
        return found

    def next(self, timeout: float, *, lead: bool = False) -> Answer | None:
        """Return the next answer; None after a timeout (seconds). Frequent calls detect lost agents.

        Args:
            lead: wait for the oldest pending answer; it then arrives without a hand-off between threads.
        """
        deadline = time.monotonic() + timeout
        while True:
            lost = self._look_after()
            if lost is not None:
                return lost
            rest = deadline - time.monotonic()
            slice_ = max(0.0, min(rest, 0.25))
            if lead and self._events.empty():
                self._wait(slice_)
                slice_ = 0.0
            try:
                event = self._events.get(timeout=slice_) if slice_ else self._events.get_nowait()
            except queue.Empty:
                if rest <= 0:
                    return None
                continue
            answer = self._answer(event)
            if answer is not None:
                return answer

    def _send(self, host: str, number: int, about: object, request: str, args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = self._lines[host].link.actor.work.call_one(request, *args)
        future.add_done_callback(lambda done: self._events.put(_Event(host, number, about, done)))
        return future

    def _wait(self, timeout: float) -> None:
        """Wait for an answer of any host. This thread receives all messages meanwhile."""
        for line in self._lines.values():
            for future in line.open.values():
                try:
                    future.exception(timeout)
                except TimeoutError:
                    pass
                return
        time.sleep(min(timeout, 0.01))

    def _answer(self, event: _Event) -> Answer | None:
        if event.future is None:
            return Answer("", event.about, event.value)
        line = self._lines[event.host]
        if line.gone or (event.number != _PING and event.number not in line.open):
            return None  # its caller no longer waits for it
        line.heard, line.pinged = time.monotonic(), 0.0
        line.open.pop(event.number, None)
        try:
            value = event.future.get()
        except SupervisionError as e:
            return self._give_up(event.host, line, f"its sync agent has ended: {e.cause or e}")
        except Exception as e:
            value = Failed(type(e).__name__, str(e))
        return None if event.number == _PING else Answer(event.host, event.about, value)

    def _give_up(self, host: str, line: _Line, why: str) -> Answer:
        line.gone = why
        line.open.clear()
        return Answer(host, None, Failed("HostLostError", why), lost=True)

    def _look_after(self) -> Answer | None:
        now = time.monotonic()
        quiet = min(QUIET, self._patience / 2)
        for host, line in self._lines.items():
            if not line.open or line.gone:
                continue
            if line.pinged and now - line.pinged > self._patience - quiet:
                why = f"its sync agent has not answered for {now - line.heard:.0f} s: it is stopped, or overloaded"
                line.link.procs.kill("its requests had no answer")  # releases its locks, so another can begin
                return self._give_up(host, line, why)
            if not line.pinged and now - line.heard > quiet:
                line.pinged = now
                self._send(host, _PING, None, "ping", ())
        return None
