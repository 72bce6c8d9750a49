"""What the data plane raises beside ``ValueError`` and ``TypeError`` (which are about arguments)."""

from __future__ import annotations


class RDMAError(RuntimeError):
    """A transfer that could not be done: the owner died, the buffer was dropped, no backend reaches it.

    Attributes:
        owner: name of the proc that owns the buffer.
    """

    def __init__(self, message: str, owner: str = "") -> None:
        super().__init__(message)
        self.owner = owner


class RDMATimeoutError(RDMAError, TimeoutError):
    """A transfer that did not end in time; what it was to write is undefined."""


class Unfit(Exception):
    """A backend finds out that it cannot serve this pair of processes; the next best takes over."""


class Gone(Exception):
    """The process that owns the buffer no longer exists."""
