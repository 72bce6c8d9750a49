"""The actor of `bench.tracing`, in a module that its ranks can import."""

from __future__ import annotations

from monarch_kernel.actor import Actor, endpoint


class Idle(Actor):
    """An actor that does nothing."""

    @endpoint
    def nothing(self) -> None:
        """Do nothing: an endpoint at no cost."""
