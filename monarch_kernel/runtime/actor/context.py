"""The running actor and its current message: ``context()`` and its shorthands."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from monarch_kernel.runtime.actor.process import RunningActor, get_system
from monarch_kernel.runtime.mesh.shape import SINGLE, Extent, Point


class Context:
    """The position of the running code.

    Attributes:
        actor_instance: the running actor; outside any actor, the client.
    """

    __slots__ = ("_endpoint", "_extent", "_rank", "actor_instance")

    def __init__(self, actor_instance: RunningActor, rank: int, extent: Extent, endpoint: str = "") -> None:
        self.actor_instance = actor_instance
        self._endpoint = endpoint
        self._rank = rank
        self._extent = extent

    @property
    def message_rank(self) -> Point:
        """The position of this actor in the slice that the current message was sent to."""
        return Point(self._rank, self._extent)

    @property
    def endpoint_name(self) -> str:
        """The running endpoint; empty outside endpoints."""
        return self._endpoint

    def __repr__(self) -> str:
        return f"Context({self.actor_instance!r}, message_rank={self.message_rank!r})"


current: ContextVar[Context | None] = ContextVar("monarch_kernel_context", default=None)

#: What the running code runs on behalf of, such as a notebook cell; None where that is not known. Calls carry it along,
#: so that what an actor puts out belongs to what caused it, through any number of actors.
origin: ContextVar[str | None] = ContextVar("monarch_kernel_origin", default=None)
_latest_origin = ""


def set_origin(name: str) -> None:
    """From now on the calling thread or task, and all that have no origin of their own, run on behalf of ``name``."""
    global _latest_origin
    _latest_origin = name
    origin.set(name)


def calling_origin() -> str:
    """What a call made here is made on behalf of; empty for nothing."""
    return origin.get() or _latest_origin


@contextmanager
def on_behalf_of(name: str) -> Generator[None]:
    """Calls that are made in this block have that origin, though another cell may run by now."""
    token = origin.set(name or None)
    try:
        yield
    finally:
        origin.reset(token)


def context() -> Context:
    """The context of the running code; outside any actor, that of the client (which starts the runtime if need be)."""
    here = current.get()
    if here is None:
        return Context(get_system().client, 0, SINGLE)
    return here


def current_rank() -> Point:
    """Position of the running actor in the slice to which the current message was sent."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """Dimensions of the slice to which the current message was sent."""
    extent = context().message_rank.extent
    return dict(zip(extent.names, extent.shape, strict=True))


def current_actor_name() -> str:
    """Full name of the running actor."""
    return context().actor_instance.actor_id


def shared(labels: Any, sizes: Any) -> Extent:
    """An extent for a header's labels and sizes (the same object for the same values)."""
    key = (labels, sizes)
    extent = _extents.get(key)
    if extent is None:
        if len(_extents) > 1024:
            _extents.clear()
        extent = _extents[key] = Extent(labels, sizes)
    return extent


_extents: dict[Any, Extent] = {}
