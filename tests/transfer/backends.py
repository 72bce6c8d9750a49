"""This process's backends, for tests that look inside."""

from __future__ import annotations

from monarch_kernel.runtime.transfer.service import transfer_service
from monarch_kernel.runtime.transfer.tcp import Tcp


def tcp() -> Tcp:
    """The one for TCP."""
    return next(backend for backend in transfer_service().backends if isinstance(backend, Tcp))
