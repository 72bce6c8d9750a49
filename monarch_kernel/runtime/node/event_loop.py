"""An asyncio event loop whose own wait doubles as the process's poll.

An async actor's loop sleeps in ``select``. With ``LeadingSelector`` that sleep is the poll of the whole process
whenever no other thread leads, so that a message for the actor is handled by the thread it is for, without a hand-off.
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

    Epoll sets nest: its own set is one of the poller's descriptors. The leading thread notes that something is
    ready there; edge-triggered, as only the loop's thread can handle it.
    """

    def __init__(self, poller: Poller) -> None:
        self._own = selectors.EpollSelector()
        self._poller = poller
        self._ready = False
        poller.register(self._own.fileno(), self._note, EPOLLIN | select.EPOLLET)

    def _note(self, _events: int) -> None:
        self._ready = True

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._own.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._own.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._own.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._own.get_map()

    def select(self, timeout: float | None = None) -> Events:
        if timeout is not None and timeout <= 0:
            # Callbacks wait to be run. With nothing registered but what wakes the loop up, there is nothing to see.
            return self._look(0) if len(self._own.get_map()) > 1 else []
        if self._ready:
            found = self._look(0)
            if found:
                return found
        if not self._poller.lead_once(-1 if timeout is None else timeout):
            return self._look(timeout)
        return self._look(0) if self._ready else []

    def _look(self, timeout: float | None) -> Events:
        self._ready = False
        found = self._own.select(timeout)
        if found:
            self._ready = True  # until a look finds nothing: what is not read up makes no new edge
        return found

    def close(self) -> None:
        self._poller.unregister(self._own.fileno())
        self._own.close()


def new_loop(poller: Poller) -> asyncio.AbstractEventLoop:
    """An event loop for the calling thread that polls for the whole process while it is idle."""
    return asyncio.SelectorEventLoop(LeadingSelector(poller))
