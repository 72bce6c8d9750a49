"""An asyncio event loop whose own wait doubles as the process's poll.

An async actor's loop sleeps in ``select``. With ``LeadingSelector`` that sleep also watches the node's epoll set
whenever nobody else leads, so that a message for the actor is handled by the thread it is for, without a hand-off.
"""

from __future__ import annotations

import asyncio
import select
import selectors
from collections.abc import Mapping
from typing import Any

from monarch_kernel.runtime.node.poller import Poller


class LeadingSelector(selectors.BaseSelector):
    """An epoll selector that leads the node's poller while it sleeps."""

    def __init__(self, poller: Poller) -> None:
        self._own = selectors.EpollSelector()
        self._poller = poller
        # Epoll sets nest: the outer one is ready when either of the two has something.
        self._both = select.epoll()
        self._both.register(self._own.fileno(), select.EPOLLIN)
        self._both.register(poller.fileno(), select.EPOLLIN)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._own.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._own.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._own.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._own.get_map()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        poller = self._poller
        if (timeout is not None and timeout <= 0) or not poller.try_lead():
            return self._own.select(timeout)
        try:
            timer = poller.next_timer()
            if timer is not None and (timeout is None or timer < timeout):
                timeout = timer
            ready = self._both.poll(-1 if timeout is None else timeout)
            if any(fd == poller.fileno() for fd, _ in ready) or timer is not None:
                poller.step()
        finally:
            poller.end_lead()
        return self._own.select(0)

    def close(self) -> None:
        self._both.close()
        self._own.close()


def new_loop(poller: Poller) -> asyncio.AbstractEventLoop:
    """An event loop for the calling thread that polls for the whole process while it is idle."""
    return asyncio.SelectorEventLoop(LeadingSelector(poller))
