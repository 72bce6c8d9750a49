"""Hold messages back while the bootstrap of a process runs.

Actors that the owner of a proc spawns on it wait until the bootstrap returns, and so do messages for these actors. An
actor that the bootstrap itself spawns, on ``this_proc()``, must not wait: the bootstrap may call it, or wait for
another process that calls it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

from monarch_kernel.protocol.messages import Call, Create, StopActor
from monarch_kernel.runtime.actor.wire_types import Body, MessageLink

HeldMessage: TypeAlias = Call | Create | StopActor


class BootstrapHold:
    """Messages for actors that must wait for the bootstrap, in order of arrival.

    Args:
        handle: handles one message at once.
        is_known: whether an actor with that id exists here, or existed.
    """

    def __init__(
        self, handle: Callable[[MessageLink, HeldMessage, Body], None], is_known: Callable[[str], bool]
    ) -> None:
        self._handle = handle
        self._is_known = is_known
        self._lock = threading.RLock()
        self._kept: list[tuple[MessageLink, HeldMessage, Body]] = []
        self._releasing = False
        self._over = False

    def takes(self, link: MessageLink, message: HeldMessage, body: Body) -> bool:
        """Hold or handle the message and return True. If it returns False, the caller must handle the message now."""
        with self._lock:
            if self._over:
                return False
            if not self._releasing:
                if self._is_known(message.actor):
                    return False
                if type(message) is Create and message.inner:
                    self._create(link, message, body)
                    return True
            self._kept.append((link, message, bytes(body) if isinstance(body, memoryview) else body))
            return True

    def _create(self, link: MessageLink, create: Create, body: Body) -> None:
        """Create an actor now, and deliver the messages that arrived for it before."""
        mine = [entry for entry in self._kept if entry[1].actor == create.actor]
        self._kept = [entry for entry in self._kept if entry[1].actor != create.actor]
        self._handle(link, create, body)
        for entry in mine:
            self._handle(*entry)

    def release(self) -> None:
        """Handle the held messages in order, and hold no further messages."""
        while True:
            with self._lock:
                # Later messages queue behind the held ones, whichever actor they are for.
                self._releasing = True
                kept, self._kept = self._kept, []
                if not kept:
                    self._over = True
                    return
            for entry in kept:
                self._handle(*entry)
