"""Errands for the main thread while it waits for ranks."""

from __future__ import annotations

from collections.abc import Callable


def call_in_wait(errand: Callable[[], None]) -> None:
    """Have the main thread of this process call ``errand()`` where it waits for ranks: now, or when it waits next.

    It may wait itself. What it raises ends the wait.
    """
    from monarch_kernel.runtime.actor.system import get_system

    get_system().node.poller.call_in_wait(errand)
