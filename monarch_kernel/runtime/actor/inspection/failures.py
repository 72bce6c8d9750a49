"""The failures that a debugger can inspect: those kept in this process, and a hook for new ones."""

from __future__ import annotations

from collections.abc import Callable

from monarch_kernel.runtime.actor.execution import postmortem
from monarch_kernel.runtime.actor.inspection.activity import running_here
from monarch_kernel.runtime.actor.process import get_system, started
from monarch_kernel.subscriptions import Subscription


def keep_failure(
    error: BaseException,
    cell: str,
    running: tuple[str, str] | None = None,
    later: Callable[[float, Callable[[], None]], object] | None = None,
) -> None:
    """Keep an exception of user code that a tool's endpoint caught, as if the endpoint itself had failed.

    Args:
        cell: the cell that it ran for.
        running: the actor and the endpoint, where another engine runs them.
        later: calls a function after a delay in seconds, where there is no system of ours.
    """
    name, endpoint = running or running_here()[:2]
    postmortem.failed(error, name, endpoint, cell, later or get_system().node.poller.call_later)


def on_failure(callback: Callable[[BaseException], None] | None) -> Subscription | None:
    """Call ``callback(error)`` on the thread where an endpoint or a cell fails, before any other report of the failure.

    Returns:
        The subscription; close (or call) it to unsubscribe. ``on_failure(None)`` ends all subscriptions.
    """
    if callback is None:
        postmortem.failed_here.clear()
        return None
    return postmortem.failed_here.subscribe(callback)


failures = postmortem.failures


def latest_failure() -> postmortem.Failure | None:
    """The failure that ended what ran last here; None if its actor has begun another endpoint since."""
    kept = postmortem.failures()
    if not kept:
        return None
    last = kept[-1]
    actors = list(get_system().actors.values()) if last.begun >= 0 and started() else []
    superseded = any(each.name == last.actor and getattr(each, "calls", 0) > last.begun for each in actors)
    return None if superseded else last
