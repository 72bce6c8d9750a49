"""An asyncio event loop that polls for the whole process while it waits.

An async actor's loop sleeps in ``select``. With ``LeadingSelector``, that sleep polls for the whole process when no
other thread leads, so the actor's own thread handles messages for the actor, without a hand-off.
"""

from __future__ import annotations

import asyncio
import select
import selectors
from collections.abc import Mapping
from typing import Any

from monarch_kernel.runtime.node.poller import EPOLLIN, Poller

Events = list[tuple[selectors.SelectorKey, int]]


class LeadingSelector(selectors.BaseSelector):
    """An epoll selector that leads the node's poller while it sleeps.

    Epoll sets nest: its own set is one of the poller's descriptors. The leading thread records that the set is ready.
    The set is edge-triggered, because only the loop's thread can handle its events.

    Attributes:
        ready: whether the set may be ready. Only the leading thread sets it.
    """

    def __init__(self, poller: Poller) -> None:
        self._own = selectors.EpollSelector()
        self._poller = poller
        self.ready = False
        self._registered = 0
        poller.register(self._own.fileno(), self._note, EPOLLIN | select.EPOLLET)

    def _note(self, _events: int) -> None:
        self.ready = True

    def register(self, fileobj: Any, events: int, data: object = None) -> selectors.SelectorKey:
        key = self._own.register(fileobj, events, data)
        self._registered += 1
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = self._own.unregister(fileobj)
        self._registered -= 1
        return key

    def modify(self, fileobj: Any, events: int, data: object = None) -> selectors.SelectorKey:
        return self._own.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._own.get_map()

    def select(self, timeout: float | None = None) -> Events:
        if timeout is not None and timeout <= 0:
            # Callbacks are pending. If only the loop's wake-up descriptor is registered, there is nothing to poll.
            return self._look(0) if self._registered > 1 else []
        if self.ready:
            found = self._look(0)
            if found:
                return found
        if not self._poller.lead_once(-1 if timeout is None else timeout, self):
            return self._look(timeout)
        return self._look(0) if self.ready else []

    def _look(self, timeout: float | None) -> Events:
        self.ready = False
        found = self._own.select(timeout)
        if found:
            self.ready = True  # until a poll finds nothing: unread data triggers no new edge
        return found

    def close(self) -> None:
        self._poller.unregister(self._own.fileno())
        self._own.close()


def new_loop(poller: Poller) -> asyncio.AbstractEventLoop:
    """Create an event loop for the calling thread that polls for the whole process while it is idle."""
    return asyncio.SelectorEventLoop(LeadingSelector(poller))
