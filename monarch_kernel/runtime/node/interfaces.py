"""What a node and those that use it are to each other: links, handlers of messages, sinks of replies, gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from monarch_kernel.protocol.messages import Death, Reply, Routed
from monarch_kernel.protocol.serialize import Body


class PeerLink(Protocol):
    """A link as its users see it: over a socket (``Link``, ``TcpLink``), by way of gateways, or to this process."""

    peer: str  # the node at the other end; "" until it has said hello
    pid: int
    local: bool  # whether the other end is on this machine, and can share memory with this one
    ended: str  # why it was closed, in one clause; "" if there is nothing to say

    @property
    def attached(self) -> bool:
        """Whether what is sent goes out now, and does not wait for a connection."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        ...

    @property
    def queued(self) -> int:
        """Bytes that the kernel has not taken yet."""
        ...

    def send(self, header: bytes, body: Body = b"") -> None:
        """Send one message: an encoded header and a body, bytes-like or a list of bytes-like pieces."""

    def drain(self) -> None:
        """Handle everything that has already arrived; for a peer known to be dead."""

    def close(self) -> None:
        """End it; later sends go nowhere."""

    def abandon(self) -> None:
        """In a fork of this process: leave the connection to the other one."""


#: Handles one type of message: the link that it came over, its header, its body. ``Node.handle`` checks the type.
Handler = Callable[[PeerLink, Any, Body], None]
#: Decides when a message that came from another site is delivered: now, or later by the function it gets.
Gate = Callable[[Routed, PeerLink, Callable[[], None]], None]


class Sink(Protocol):
    """Where the replies of one call go."""

    def on_reply(self, rank: int, status: int, body: Body, buffers: tuple[int, ...]) -> None:
        """One rank's answer."""

    def on_peer_dead(self, proc: str, death: Death) -> None:
        """A proc died; fails whatever this call still expects from it."""


class ReplyGate(Protocol):
    """Keeps replies of ranks back until their earlier output is here."""

    def holds(self, proc: str, reply: Reply, body: Body) -> bool:
        """Whether this reply will be given to ``Node.settle`` later."""
        ...

    def release(self, proc: str) -> None:
        """Give out what is held of a proc: it is dead."""
