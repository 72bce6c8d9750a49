"""Errands for the main thread while it waits for ranks."""

from __future__ import annotations

from collections.abc import Callable

from monarch_kernel.runtime.actor.process import get_system


def call_in_wait(errand: Callable[[], None]) -> None:
    """Call ``errand()`` on the main thread of this process while it waits for ranks: now, or in its next wait.

    The errand may wait itself. An exception in it ends the wait.
    """
    get_system().node.poller.call_in_wait(errand)
