"""This process's backends, for tests that look inside."""

from __future__ import annotations

from monarch_kernel.runtime.transfer.engine import engine
from monarch_kernel.runtime.transfer.tcp.backend import Tcp


def tcp() -> Tcp:
    """The one for TCP."""
    return next(backend for backend in engine().backends if isinstance(backend, Tcp))
