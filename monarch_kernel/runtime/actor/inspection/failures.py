"""The failures that a debugger can look into: those kept in this process, and a hook for new ones."""

from __future__ import annotations

from typing import Any

from monarch_kernel.runtime.actor.execution import postmortem
from monarch_kernel.runtime.actor.inspection.activity import running_here
from monarch_kernel.runtime.actor.process import get_system


def keep_failure(error: BaseException, cell: str) -> None:
    """Keep an exception of user code that a tool's endpoint caught, as if the endpoint itself had failed."""
    name, endpoint, _ = running_here()
    postmortem.failed(error, name, endpoint, cell, get_system().node.poller.call_later)


def on_failure(callback: Any) -> None:
    """Call ``callback(error)`` where an endpoint or a cell fails, before it is reported; None removes the callback."""
    postmortem.on_failure = callback


failures = postmortem.failures
