"""The failures that a debugger can look into: those kept in this process, and a hook for new ones."""

from __future__ import annotations

from typing import Any

from monarch_kernel.runtime.actor.execution import postmortem
from monarch_kernel.runtime.actor.inspection.activity import running_here


def keep_failure(error: BaseException, cell: str) -> None:
    """A tool's endpoint has caught what the user's code raised: keep it as that of an endpoint would be."""
    from monarch_kernel.runtime.actor.system import get_system

    name, endpoint, _ = running_here()
    postmortem.failed(error, name, endpoint, cell, get_system().node.poller.call_later)


def on_failure(callback: Any) -> None:
    """Have ``callback(error)`` called where an endpoint or a cell fails, before anybody is told; None ends that."""
    postmortem.on_failure = callback


failures = postmortem.failures
