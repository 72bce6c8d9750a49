"""The interfaces between a node and its users: links, message handlers, reply sinks and gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from monarch_kernel.protocol.messages import Death, Reply, Routed, SegmentRef
from monarch_kernel.protocol.serialize import Apart, Body


class PeerLink(Protocol):
    """A link as its users see it: over a socket (``Link``, ``TcpLink``), through gateways, or to this process."""

    peer: str  # the node at the other end; "" until it has said hello
    pid: int
    local: bool  # whether the other end is on this machine and can share memory
    ended: str  # why it was closed, in one clause; "" if there is no special reason

    @property
    def attached(self) -> bool:
        """Whether messages are sent at once, without waiting for a connection."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the link has ended."""
        ...

    @property
    def queued(self) -> int:
        """Bytes that the kernel has not accepted yet."""
        ...

    def send(self, header: bytes, body: Body = b"") -> None:
        """Send one message: an encoded header and a body, bytes-like or a list of bytes-like pieces."""

    def drain(self) -> None:
        """Handle all data that has already arrived, for a peer known to be dead."""

    def close(self) -> None:
        """End the link; later sends are dropped."""

    def abandon(self) -> None:
        """Leave the connection to the parent, in a forked child."""


#: Handles one type of message; gets its link, header and body. ``Node.handle`` checks the type.
Handler = Callable[[PeerLink, Any, Body], None]
#: Decides when a message from another site is delivered: it calls the given function now or later.
Gate = Callable[[Routed, PeerLink, Callable[[], None]], None]


class Sink(Protocol):
    """Receives the replies of one call."""

    def on_reply(self, rank: int, status: int, body: Body, buffers: tuple[int, ...]) -> None:
        """Handle one rank's reply."""

    def on_peer_dead(self, proc: str, death: Death) -> None:
        """Fail the replies that this call still expects from a dead proc."""


class LargeBodies(Protocol):
    """Transfers large bodies of messages to other sites, outside the control plane."""

    def offer(self, body: Body, buffers: tuple[int, ...], receivers: list[str]) -> tuple[Body, SegmentRef | None]:
        """Keep the large part of a body until these procs have fetched it. Return the rest, and the reference."""
        ...

    def receive(self, ref: SegmentRef, pickled: bytes) -> Apart:
        """Begin to fetch an offered body."""
        ...

    def drain(self, timeout: float) -> None:
        """Wait until all offered bodies have been fetched."""


class ReplyGate(Protocol):
    """Holds replies of ranks back until their earlier output has arrived."""

    def holds(self, proc: str, reply: Reply, body: Body) -> bool:
        """Return whether the gate holds this reply. It then passes the reply to ``Node.settle`` later."""
        ...

    def release(self, proc: str) -> None:
        """Settle the held replies of a proc that is dead."""
