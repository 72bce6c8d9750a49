"""Requests to agents, and their answers in the order in which they come; agents that do not answer at all are found."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.actor import Future, SupervisionError
from workspace_sync.transfer.agents import AgentLink
from workspace_sync.transfer.messages import Failed

#: After this long without a sign of life an agent that owes an answer is asked whether it is there (seconds).
QUIET = 2.0
#: An agent that does not even answer this is lost (seconds).
PATIENCE = 15.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a host has answered.

    Attributes:
        host: its key.
        about: what the request was about, as the one who asked calls it.
        value: the answer, or ``Failed``.
        lost: whether the host is lost; then ``value`` says why.
    """

    host: str
    about: Any
    value: Any
    lost: bool = False


@dataclass(slots=True)
class _Line:
    """One agent.

    Attributes:
        open: requests under way.
        heard: when it last answered.
        pinged: when it was asked whether it is there; 0: it is not being asked.
    """

    link: AgentLink
    open: int = 0
    heard: float = 0.0
    pinged: float = 0.0
    gone: str = ""


_PING = object()


class Calls:
    """The requests of one client to some agents. One thread uses it.

    Args:
        links: the agents.
        patience: how long an agent may be silent (seconds).
    """

    def __init__(self, links: list[AgentLink], patience: float = PATIENCE) -> None:
        self._lines = {link.host.key: _Line(link) for link in links}
        self._events: queue.SimpleQueue[tuple[str, Any, Future[Any] | None, Any]] = queue.SimpleQueue()
        self._patience = patience

    def ask(self, host: str, about: Any, endpoint: str, *args: Any) -> None:
        """Send a request; its answer comes from ``next``. One to a host that is lost has no answer."""
        line = self._lines[host]
        if line.gone:
            return
        if not line.open:
            line.heard = time.monotonic()
        line.open += 1
        future: Future[Any] = getattr(line.link.actor, endpoint).call_one(*args)
        future.add_done_callback(lambda done: self._events.put((host, about, done, None)))

    def tell(self, host: str, endpoint: str, *args: Any) -> None:
        """Send a request whose answer does not matter."""
        line = self._lines[host]
        if not line.gone:
            getattr(line.link.actor, endpoint).call_one(*args)

    def post(self, host: str, about: Any, value: Any) -> None:
        """Put in an event from another thread of the client."""
        self._events.put((host, about, None, value))

    @property
    def open(self) -> int:
        """Answers that are still to come."""
        return sum(line.open for line in self._lines.values() if not line.gone)

    def owes(self, host: str) -> bool:
        """Whether a host owes an answer."""
        line = self._lines[host]
        return bool(line.open) and not line.gone

    def next(self, timeout: float) -> Answer | None:
        """The next answer; None if there is none for so long (seconds). Called often, it finds lost agents."""
        deadline = time.monotonic() + timeout
        while True:
            lost = self._look_after()
            if lost is not None:
                return lost
            rest = deadline - time.monotonic()
            try:
                host, about, future, value = self._events.get(timeout=max(0.0, min(rest, 0.25)))
            except queue.Empty:
                if rest <= 0:
                    return None
                continue
            line = self._lines.get(host)
            if future is None or line is None:
                return Answer(host, about, value)
            if line.gone:
                continue
            line.heard, line.pinged = time.monotonic(), 0.0
            if about is not _PING:
                line.open -= 1
            try:
                value = future.get()
            except SupervisionError as e:
                return self._give_up(host, line, f"its sync agent has ended: {_cause(e)}")
            except Exception as e:
                if about is _PING:
                    continue
                value = Failed(type(e).__name__, str(e))
            if about is not _PING:
                return Answer(host, about, value)

    def _give_up(self, host: str, line: _Line, why: str) -> Answer:
        line.gone = why
        line.open = 0
        return Answer(host, None, Failed("HostLostError", why), lost=True)

    def _look_after(self) -> Answer | None:
        now = time.monotonic()
        for host, line in self._lines.items():
            if not line.open or line.gone:
                continue
            if line.pinged and now - line.pinged > self._patience - QUIET:
                why = f"its sync agent has not answered for {now - line.heard:.0f} s: it is stopped, or its disk hangs"
                return self._give_up(host, line, why)
            if not line.pinged and now - line.heard > min(QUIET, self._patience / 2):
                line.pinged = now
                future: Future[Any] = line.link.actor.ping.call_one()
                future.add_done_callback(lambda done, host=host: self._events.put((host, _PING, done, None)))
        return None


def _cause(error: SupervisionError) -> str:
    return error.cause or str(error)
