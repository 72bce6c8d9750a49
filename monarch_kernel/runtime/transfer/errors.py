"""Exceptions of the data plane, other than ``ValueError`` and ``TypeError`` for wrong arguments."""

from __future__ import annotations


class RDMAError(RuntimeError):
    """A transfer failed: the owner died, the buffer was dropped, or no backend reaches it.

    Attributes:
        owner: name of the proc that owns the buffer.
    """

    def __init__(self, message: str, owner: str = "") -> None:
        super().__init__(message)
        self.owner = owner


class RDMATimeoutError(RDMAError, TimeoutError):
    """A transfer did not end in time. The contents of its target are undefined."""


class Unfit(Exception):
    """A backend cannot serve this pair of processes. The next best one takes over."""


class Gone(Exception):
    """The process that owns the buffer no longer exists."""
