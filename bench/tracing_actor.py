"""The actor of `bench.tracing`; importable in its ranks."""

from __future__ import annotations

from monarch_kernel.actor import Actor, endpoint


class Idle(Actor):
    """Does nothing."""

    @endpoint
    def nothing(self) -> None:
        """An endpoint at no cost."""
