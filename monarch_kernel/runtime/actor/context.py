"""The running actor and its current message: ``context()`` and its shorthands."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from monarch_kernel.runtime.actor.process import get_system, started
from monarch_kernel.runtime.mesh.shape import SINGLE, Extent, Point

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.execution.instance import Instance


class Context:
    """The actor and the message that the running code belongs to.

    Attributes:
        actor_instance: the running actor; outside any actor, the client.
    """

    __slots__ = ("_endpoint", "_extent", "_rank", "_since", "actor_instance")

    def __init__(self, actor_instance: Instance, rank: int, extent: Extent, endpoint: str = "", since: int = 0) -> None:
        self.actor_instance = actor_instance
        self._since = since  # the number of calls that the actor had begun before
        self._endpoint = endpoint
        self._rank = rank
        self._extent = extent

    @property
    def message_rank(self) -> Point:
        """The position of this actor in the slice to which the current message was sent."""
        return Point(self._rank, self._extent)

    @property
    def endpoint_name(self) -> str:
        """The running endpoint; empty outside endpoints."""
        return self._endpoint

    def __repr__(self) -> str:
        return f"Context({self.actor_instance!r}, message_rank={self.message_rank!r})"


current: ContextVar[Context | None] = ContextVar("monarch_kernel_context", default=None)

#: The origin of the running code, such as a notebook cell; None if unknown. Calls carry it along, so that output of an
#: actor is attributed to the origin that caused it, through any number of actors.
origin: ContextVar[str | None] = ContextVar("monarch_kernel_origin", default=None)
_latest_origin = ""


def set_origin(name: str) -> None:
    """Set the origin of the calling thread or task, and of all without an origin, to ``name``."""
    global _latest_origin
    _latest_origin = name
    origin.set(name)


def calling_origin() -> str:
    """Return the origin of a call made here; empty if there is none."""
    return origin.get() or _latest_origin


def caller() -> tuple[str, str]:
    """Return the actor that makes a call here, by the unique name of its mesh, and the call's origin; "" for none."""
    here = current.get()
    return here.actor_instance.mesh_id if here is not None else "", origin.get() or _latest_origin


@contextmanager
def on_behalf_of(name: str) -> Generator[None]:
    """Give calls made in this block the origin ``name``, even if another cell runs meanwhile."""
    token = origin.set(name or None)
    try:
        yield
    finally:
        origin.reset(token)


def context() -> Context:
    """Return the context of the running code; outside any actor, the client's context.

    Starts the runtime if necessary.
    """
    here = current.get()
    if here is None:
        global _outside
        client = get_system().client
        if _outside is None or _outside.actor_instance is not client:
            _outside = Context(client, 0, SINGLE)
        return _outside
    return here


_outside: Context | None = None  # the client's context


class RunningContext:
    """Stands for a private context variable of Monarch. Programs read it to check whether a runtime was started."""

    def get(self, default: object = None) -> Any:
        """Return the context of the running code, or ``default`` before the runtime has started."""
        return context() if current.get() is not None or started() else default


running = RunningContext()


def current_rank() -> Point:
    """Position of the running actor in the slice to which the current message was sent."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """Dimensions of the slice to which the current message was sent."""
    extent = context().message_rank.extent
    return dict(zip(extent.names, extent.shape, strict=True))


def current_actor_name() -> str:
    """Full name of the running actor."""
    return str(context().actor_instance.actor_id)


def shared(labels: Any, sizes: Any) -> Extent:
    """Return an extent for a header's labels and sizes (the same object for the same values)."""
    key = (labels, sizes)
    extent = _extents.get(key)
    if extent is None:
        if len(_extents) > 1024:
            _extents.clear()
        extent = _extents[key] = Extent(labels, sizes)
    return extent


_extents: dict[object, Extent] = {}
